"""Keys of random streams: a hash of the seed and the purpose, so that neither order nor workers matter. No torch."""

import hashlib


def stream_key(seed: int, *purpose: str | int) -> int:
    """Return 64 bits for one purpose, such as `("drop", layer, "expert", 3)`; no two purposes share a key."""
    text = "\x1f".join(str(part) for part in (seed, *purpose))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
