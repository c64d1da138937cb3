"""What `export` is told, as data."""

from dataclasses import dataclass
from typing import Literal

from moesaic.common.errors import MoesaicError

TargetName = Literal[
    "auto", "moesaic", "mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "flex_olmo", "granitemoeshared", "gguf"
]
TARGETS = ("auto", "moesaic", "mixtral", "qwen3_moe", "qwen2_moe", "olmoe", "flex_olmo", "granitemoeshared", "gguf")
DtypeName = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True, kw_only=True)
class ExportRecipe:
    """The settings of one export."""

    checkpoint: str
    """Folder or hub id."""
    to: str = "auto"
    """`auto`, `moesaic` (our architecture), a native family, or `gguf`."""
    layout: Literal["input", "family", "per-expert", "fused"] = "family"
    """How experts are stored; `input` is the checkpoint's own where the family stays, else as `family`."""
    dtype: DtypeName | None = None
    """Of all weights; None keeps the checkpoint's."""
    shard_size: str = "5GB"
    """Largest size of a weight file."""
    allow_nonfinite: bool = False
    """Accept NaN and infinity in the weights."""

    def __post_init__(self) -> None:
        if self.to == "gguf" and self.layout != "family":
            raise MoesaicError(f"--layout {self.layout}: GGUF files have one layout; leave it out")
