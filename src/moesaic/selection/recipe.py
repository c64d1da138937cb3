"""What `select`, `extract` and `merge-back` are told. Imports nothing heavy, so that the command line can."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from moesaic.common.errors import MoesaicError
from moesaic.selection.scorers import METHODS

if TYPE_CHECKING:
    Method = str
else:
    Method = Literal[METHODS]  # the keys of SCORERS, which a type checker cannot read

EasyEpVariant = Literal["original", "emo"]

PARTS = ("router", "shared", "other")
"""What can be put back besides the experts."""


@dataclass(frozen=True, kw_only=True)
class SelectRecipe:
    """How to choose experts, and on what."""

    checkpoint: str
    """The model: folder or hub id org/name[@revision], with its tokenizer."""
    keep: str | int | None = None
    """Routed experts to keep in each layer: a number, or a share of them such as 25%; shared experts come on top."""
    keep_total: str | int | None = None
    """The same with shared experts counted: 25% of 127 routed and 1 shared are 32, of which 31 are routed."""
    data: tuple[str, ...] = ()
    """Calibration text: .txt, .md, .jsonl or .parquet, a file or a folder of files; repeatable, a domain each."""
    task: tuple[str, ...] = ()
    """Calibrate on what eval asks of a task: its name, or a YAML file; repeatable, a domain each."""
    data_dir: str | None = None
    """--task: folder with local rows. Default: the hub's data sets."""
    method: Method = "router"
    """How experts are scored."""
    easy_ep_variant: EasyEpVariant = "original"
    """easy_ep: before the block's norm and routed output only, or EMO's way."""
    layerwise: bool = False
    """Score each layer with the layers before it already cut."""
    examples: int | None = None
    """Records to use, drawn by the seed; fewer are a part of more. Default: all."""
    shots: int | None = None
    """Other records put before each example; of a task, its demonstrations. Default: 0, or a task file's own."""
    template: str | None = None
    """Text of a record, such as 'Q: {question}\\nA: {answer_text}'. Default: by its fields."""
    split: float | None = None
    """Use this share of the records only, such as 0.4; the rest is for evaluation."""
    only: tuple[str, str] | None = None
    """(field, value): use the records with this value only."""
    domain: str | None = None
    """Name of the data. Default: from the file's name."""
    stats: tuple[str, ...] = ()
    """Statistics to use, repeatable: added within a domain, mixed over domains."""
    stats_out: str | None = None
    """Write the statistics of this pass here."""
    top_k: int | None = None
    """Experts that each token of the subset uses. Default: as the model."""
    max_tokens: int = 2048
    """First tokens of each text that are used."""
    batch_size: int = 8
    """Texts at once; more is faster and needs more memory."""
    seed: int = 0
    """Seed of every random number."""

    @property
    def asked(self) -> str:
        """The flag that says how many, and its value."""
        return f"--keep {self.keep}" if self.keep_total is None else f"--keep-total {self.keep_total}"

    def __post_init__(self) -> None:
        self._check_keep()
        read = [*self.data, *self.task]
        if not read and not self.stats and self.method != "random":
            raise MoesaicError(f"--method {self.method}: needs calibration text; give --data FILE, or --stats FILE")
        if self.stats_out is not None and not read:
            raise MoesaicError(
                f"--stats-out {self.stats_out}: there is no pass to write statistics of; give --data FILE"
            )
        if self.layerwise and (self.stats or self.stats_out is not None or not read):
            raise MoesaicError(
                "--layerwise: scores belong to this choice of experts, so it takes --data and no --stats or --stats-out"
            )
        if self.stats_out is not None and len(read) > 1:
            raise MoesaicError(
                f"--stats-out {self.stats_out}: holds one domain; measure each set of data in its own call"
            )
        for flag, value in (("--template", self.template), ("--by", self.only)):
            if self.task and value is not None:
                raise MoesaicError(f"--task {self.task[0]}: is asked as eval asks it; leave {flag} out")
        if self.domain is not None and len(read) > 1:
            raise MoesaicError(
                f"--domain {self.domain}: names one set of data, and there are {len(read)}; leave it out"
            )
        for flag, value in (("--max-tokens", self.max_tokens), ("--batch-size", self.batch_size)):
            if value < 1:
                raise MoesaicError(f"{flag} {value}: must be at least 1")

    def _check_keep(self) -> None:
        if self.keep is None and self.keep_total is None:
            raise MoesaicError(
                "--keep: is needed; give the number of experts to keep in each layer, or a share such as 25%"
            )
        if self.keep is not None and self.keep_total is not None:
            raise MoesaicError("--keep, --keep-total: give one of the two, shared experts counted or not")


@dataclass(frozen=True, kw_only=True)
class ExtractRecipe:
    """What to extract."""

    checkpoint: str
    """The full model: folder, or hub id org/name[@revision]."""
    selection: Any
    """What `moesaic select` wrote."""
    top_k: int | None = None
    """Experts that each token uses. Default: as the selection says, else as the model."""
    allow_nonfinite: bool = False
    """Accept NaN and infinity in the weights."""


@dataclass(frozen=True, kw_only=True)
class MergeBackRecipe:
    """What to put back."""

    full: str
    """The model that the subset was extracted from: folder or hub id."""
    subset: str
    """What `moesaic extract` wrote, trained or not."""
    parts: tuple[str, ...] = ()
    """Put back as well, with commas: router (rows of these experts), shared (shared experts), other (all the rest)."""
    average: float | None = None
    """Share of the subset in the mean with the full model. Default: replace."""
    allow_nonfinite: bool = False
    """Accept NaN and infinity in the weights."""

    def __post_init__(self) -> None:
        for part in self.parts:
            if part not in PARTS:
                raise MoesaicError(f"--with {part}: not one of {', '.join(PARTS)}")
        if self.average is not None and not 0.0 <= self.average <= 1.0:
            raise MoesaicError(f"--average {self.average}: must be from 0 (full) to 1 (subset)")
