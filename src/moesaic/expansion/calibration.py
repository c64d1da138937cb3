"""The batches that `expand` takes its gradients from: files of text, and the requests of tasks."""

import json
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

from moesaic.common.errors import MoesaicError
from moesaic.common.progress import notice
from moesaic.evaluation.own import is_task
from moesaic.expansion.recipe import ExpandRecipe
from moesaic.expansion.resolve import ExpandPlan

if TYPE_CHECKING:
    from moesaic.data.packing import PackedBatch


def calibration_batches(plan: ExpandPlan, *, quiet: bool = False) -> list["PackedBatch"]:
    """At most `utility_batches` batches of packed text, shuffled by the seed; several sources have the same share."""
    from moesaic.data.dataset import PackedDataset
    from moesaic.data.recipe import DataRecipe, SourceRecipe
    from moesaic.data.tokenise import prepare
    from moesaic.data.vocabulary import within_vocabulary
    from moesaic.loading import load_tokenizer

    recipe = plan.recipe
    alone = len(recipe.calibration) == 1
    with tempfile.TemporaryDirectory() as folder:
        sources = tuple(
            SourceRecipe(path=_text_of(one, recipe, Path(folder) / f"{number}.jsonl"), domain=f"{number} {one}")
            for number, one in enumerate(recipe.calibration)
        )
        # Read once, large sources would leave no place for small ones in a few batches; so several repeat, in turns.
        data = DataRecipe(sequence_length=recipe.sequence_length, sources=sources, epochs=1 if alone else None)
        prepared = prepare(data, load_tokenizer(plan.checkpoint.path), quiet=quiet)
        prepared = within_vocabulary(prepared, int(plan.checkpoint.config["vocab_size"]))
    dataset = PackedDataset(prepared, seed=recipe.seed, sequences_per_step=recipe.batch_size)
    there = recipe.utility_batches if dataset.num_steps is None else dataset.num_steps
    batches = [dataset.batch(step) for step in range(min(there, recipe.utility_batches))]
    batches = [batch for batch in batches if batch.num_targets]
    if not batches:
        raise MoesaicError(f"--calibration {recipe.calibration[0]}: has no token to predict; give more text")
    for domain, source in enumerate(recipe.calibration if not alone else ()):
        tokens = sum(int((batch.domain_ids_BS == domain).sum()) for batch in batches)
        little = "" if tokens else "; it contributes nothing: more --utility-batches, or another order"
        notice(f"--calibration {source}: {tokens:,} tokens{little}", quiet=quiet)
    return batches


def _text_of(reference: str, recipe: ExpandRecipe, file: Path) -> str:
    """Where the text of `--calibration` lies; the requests of a task are written to `file`."""
    if not is_task(reference):
        return reference
    from moesaic.evaluation.requests import task_requests

    asked = task_requests(reference, data_dir=recipe.data_dir, shots=recipe.shots)
    file.write_text("".join(json.dumps({"text": one.text}) + "\n" for one in asked), encoding="utf-8")
    return str(file)
