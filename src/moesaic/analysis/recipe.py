"""What `moesaic inspect` is asked for. Free of torch and numpy."""

import re
from dataclasses import dataclass

from moesaic.common.errors import MoesaicError

_COUNT = re.compile(r"(\d[\d_]*(?:\.\d+)?)([kMB]?)")
_UNITS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9}


@dataclass(frozen=True, kw_only=True)
class InspectRecipe:
    """A model, data, and how much of it."""

    checkpoint: str
    """The mixture-of-experts model: folder or hub id."""
    data: tuple[str, ...] = ()
    """Text: a .jsonl, .parquet, .txt or .md file, a folder, hf://org/name, or a task by name or .yaml file, as eval
    asks it, with the answers; perplexity is the held-out text in --data-dir. Repeatable."""
    shots: int | None = None
    """--data TASK: demonstrations before each question. Default: the task file's own, else 0."""
    data_dir: str | None = None
    """--data TASK: folder with local rows. Default: the hub's data sets."""
    domain_field: str | None = None
    """Field that names a record's domain. Default: domain if there is one, else the file's name."""
    tokens: str | int = "1M"
    """At most so many tokens, of documents drawn by the seed."""
    against: str | None = None
    """A second model with the same tokenizer, for the same documents."""
    document_tokens: int = 100
    """First tokens of each document that are used."""
    similarity_tokens: int | None = None
    """First tokens of each document that the similarity of domains is of. Default: all of it."""
    min_length: int = 32
    """Leave out documents with fewer tokens."""
    max_length: int = 2048
    """Leave out documents with more tokens."""
    clusters: int = 32
    """Number of token clusters; 0 makes none, and needs no scikit-learn."""
    batch_size: int = 16
    """Documents at once; more is faster and needs more memory."""
    device: str | None = None
    """Where the model runs, such as cpu, cuda or cuda:1. Default: cuda if there is one, else cpu."""
    dtype: str | None = None
    """Data type that the model runs in. Default: the checkpoint's."""
    seed: int = 0
    """Seed of every random number."""

    def __post_init__(self) -> None:
        for name in ("most_tokens", "document_tokens", "similarity_tokens", "min_length"):
            if (value := getattr(self, name)) is not None and value < 1:
                flag = "tokens" if name == "most_tokens" else name.replace("_", "-")
                raise MoesaicError(f"--{flag} {value}: must be at least 1")
        if self.max_length < self.min_length:
            raise MoesaicError(
                f"--max-length {self.max_length}: must be at least --min-length, which is {self.min_length}"
            )
        if not self.data:
            raise MoesaicError("--data: is needed; give a file or folder of text")
        if self.clusters != 0 and not 2 <= self.clusters <= 1000:
            raise MoesaicError(f"--clusters {self.clusters}: must be from 2 to 1000, or 0 for none")
        if self.batch_size < 1:
            raise MoesaicError(f"--batch-size {self.batch_size}: must be at least 1")

    @property
    def most_tokens(self) -> int:
        """`tokens`, which may be written as 1M, 500k or 20000, as a number."""
        match = _COUNT.fullmatch(str(self.tokens))
        if match is None:
            raise MoesaicError(f"--tokens {self.tokens}: not a number of tokens; give one such as 1M, 500k or 20000")
        return round(float(match[1].replace("_", "")) * _UNITS[match[2]])
