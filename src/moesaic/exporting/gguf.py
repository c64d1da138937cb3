"""`export --to gguf`: through a native family and llama.cpp's own converter, with what it gets wrong refused before."""

import importlib.util
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from moesaic.checkpoint.headers import VOCABULARY_FILES
from moesaic.checkpoint.lazy import stored
from moesaic.checkpoint.output import check_target, output_folder, require_disk, scratch_folder
from moesaic.checkpoint.record import fenced, model_card, read_provenance, side_files, write_card, write_provenance
from moesaic.checkpoint.source import Checkpoint, open_checkpoint
from moesaic.checkpoint.write import write
from moesaic.common.errors import MoesaicError
from moesaic.common.progress import notice, warn
from moesaic.common.recipe import dump_recipe, recipe_values
from moesaic.exporting.recipe import ExportRecipe, ExportResult, LogitCheck
from moesaic.exporting.rules import failures_of, gguf_failures, refusal
from moesaic.exporting.run import ExportPlan, facts_for, plan_export, recorded_routing
from moesaic.exporting.view import becomes_ours
from moesaic.families.dense_table import EMBEDDINGS, HEAD
from moesaic.families.family import PLAIN_TOP_K, GgufFacts
from moesaic.families.moe_table import MOE_FAMILIES

FOLDER_VARIABLE = "MOESAIC_LLAMA_CPP"
CONVERTER = "convert_hf_to_gguf.py"
_CONVERTER_IMPORTS = ("gguf", "sentencepiece")
_OUTTYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_WAY_OUT = (
    "give a folder of llama.cpp with --llama-cpp: a clone, or what `pip download --no-deps --no-binary :all: "
    "llama-cpp-python` brings, unpacked, below vendor/llama.cpp"
)


@dataclass(frozen=True, kw_only=True)
class GgufPlan:
    """The native checkpoint that is converted, and how."""

    native: ExportPlan
    outtype: str
    converter: Path

    @property
    def file(self) -> str:
        """Name of the GGUF file."""
        return f"model-{self.outtype}.gguf"


def export_gguf(
    recipe: ExportRecipe,
    out: Path,
    *,
    llama_cpp: str | Path | None,
    check: bool,
    text: str | Path | None,
    device: str | None,
    overwrite: bool,
    dry_run: bool,
    quiet: bool,
    workers: int | None,
) -> ExportResult:
    """Write a folder with one GGUF file, moesaic.json, recipe.yaml and a card."""
    started = time.monotonic()
    plan = plan_gguf(recipe, llama_cpp)
    if check:
        _check_possible(plan)
    source = plan.native.checkpoint
    check_target(out, overwrite, sources=[source.path])
    nbytes = plan.native.new_checkpoint("native").files.nbytes
    require_disk(out, 3 * nbytes)
    if (caveat := _facts(plan.native.family).caveat) and not quiet:
        warn(f"{source.name}: {caveat}")
    notice(f"{source.name}: goes through {plan.native.family} ({plan.native.why})", quiet=quiet)
    checks: tuple[LogitCheck, ...] = ()
    if not dry_run:
        with _native_folder(plan, out, quiet, workers) as native:
            nbytes = _convert(plan, native, out, overwrite)
            if check:
                from moesaic.exporting.check import compare_with_llama_cpp

                checks = tuple(compare_with_llama_cpp(native, out / plan.file, text=text, device=device, quiet=quiet))
    return ExportResult(
        out=None if dry_run else out,
        family=f"gguf ({plan.native.family}, {plan.outtype})",
        why=plan.native.why,
        layout="gguf",
        nbytes=nbytes,
        seconds=time.monotonic() - started,
        checks=checks,
        notices=plan.native.notices,
    )


def plan_gguf(recipe: ExportRecipe, llama_cpp: str | Path | None) -> GgufPlan:
    """The first family that is exactly the model and that llama.cpp computes rightly.

    Raises:
        MoesaicError: there is none (says what fails in each), no converter, no tokenizer.
    """
    converter = _converter(llama_cpp)
    checkpoint = open_checkpoint(recipe.checkpoint)
    plan = _native_plan(recipe, checkpoint)
    if not side_files(checkpoint, VOCABULARY_FILES):
        raise MoesaicError(f"{checkpoint.name}: has no tokenizer, which a GGUF file contains; copy the base's files")
    outtype = _DTYPES[recipe.dtype] if recipe.dtype else _OUTTYPES[_main_dtype(plan)]
    return GgufPlan(native=plan, outtype=outtype, converter=converter)


def _main_dtype(plan: ExportPlan) -> str:
    """The dtype of most bytes."""
    sizes = dict.fromkeys(_OUTTYPES, 0)
    for one in plan.tensors.values():
        if one.dtype in sizes:
            sizes[one.dtype] += one.nbytes
    return max(sizes, key=lambda code: sizes[code])


def _native_plan(recipe: ExportRecipe, checkpoint: Checkpoint) -> ExportPlan:
    model_type = str(checkpoint.config.get("model_type"))
    plain = replace(recipe, to="auto", layout="family", dtype=None)
    if model_type in MOE_FAMILIES:
        recorded = recorded_routing((read_provenance(checkpoint.path) or {}).get("routing"))
        if (routing := recorded.get("routing", PLAIN_TOP_K)) != PLAIN_TOP_K:
            raise MoesaicError(f"{checkpoint.name}: {routing}: llama.cpp would route by plain top-k; serve it as it is")
        failures = gguf_failures(MOE_FAMILIES[model_type].gguf, checkpoint.config)
        if not failures:
            return _for_llama_cpp(plan_export(plain))
        if not becomes_ours(model_type):
            raise MoesaicError(f"{checkpoint.name}: llama.cpp would be wrong: {model_type} ({'; '.join(failures)})")
    facts = facts_for(checkpoint)
    failed = failures_of(facts)
    if all(failed.values()):
        raise refusal(checkpoint.name, facts, failed)
    broken = []
    for family in (family for family, rules in failed.items() if not rules):
        plan = plan_export(replace(plain, to=family))
        if not (lines := gguf_failures(MOE_FAMILIES[family].gguf, plan.config)):
            return _for_llama_cpp(plan)
        broken.append(f"{family} ({'; '.join(lines)})")
    raise MoesaicError(f"{checkpoint.name}: llama.cpp would be wrong: {', '.join(broken)}")


def _facts(family: str) -> GgufFacts:
    facts = MOE_FAMILIES[family].gguf
    assert facts is not None, family
    return facts


def _for_llama_cpp(plan: ExportPlan) -> ExportPlan:
    """Write out what the converter needs: config keys, and a tied output head where llama.cpp wants one of its own."""
    facts = _facts(plan.family)
    plan = replace(plan, config={**plan.config, **facts.config})
    if not (facts.own_head and plan.config.get("tie_word_embeddings")):
        return plan
    embedding = plan.checkpoint.tensors.get(EMBEDDINGS)
    if embedding is None:
        raise MoesaicError(f"{plan.checkpoint.name}: {EMBEDDINGS} is missing")
    tensors = {name: one for name, one in plan.tensors.items() if name != HEAD} | {HEAD: stored(embedding)}
    return replace(plan, tensors=tensors, config={**plan.config, "tie_word_embeddings": False})


def _converter(llama_cpp: str | Path | None) -> Path:
    folder = llama_cpp or os.environ.get(FOLDER_VARIABLE)
    if not folder:
        raise MoesaicError(f"--to gguf uses llama.cpp's converter: {_WAY_OUT}, or set {FOLDER_VARIABLE}")
    path = Path(folder) / CONVERTER
    if not path.is_file():
        raise MoesaicError(f"--llama-cpp {folder}: has no {CONVERTER}; {_WAY_OUT}")
    if missing := [module for module in _CONVERTER_IMPORTS if importlib.util.find_spec(module) is None]:
        raise MoesaicError(f"--to gguf: llama.cpp's converter needs {', '.join(missing)}; pip install 'moesaic[gguf]'")
    return path.absolute()


@contextmanager
def _native_folder(plan: GgufPlan, out: Path, quiet: bool, workers: int | None) -> Iterator[Path]:
    with scratch_folder(out) as folder:
        native = folder / "native"
        write(plan.native.new_checkpoint("native"), native, quiet=quiet, workers=workers)
        yield native


def _convert(plan: GgufPlan, native: Path, out: Path, overwrite: bool) -> int:
    """Run the converter; `out` is absent or complete at all times. Returns the size of the file."""
    source = plan.native.checkpoint
    with output_folder(out, overwrite, sources=[source.path]) as folder:
        command = [
            sys.executable, str(plan.converter), str(native), "--outfile", str(folder / plan.file),
            "--outtype", plan.outtype, "--model-name", out.name,
        ]  # fmt: skip
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
        if done.returncode or not (folder / plan.file).is_file():
            lines = [line for line in done.stderr.splitlines() if line.strip()] or ["no message"]
            raise MoesaicError(f"{plan.converter}: failed with status {done.returncode}: {lines[-1].strip()}")
        (folder / "recipe.yaml").write_text(dump_recipe(plan.native.recipe), encoding="utf-8")
        write_card(folder, _card(plan, out))
        write_provenance(
            folder,
            verb="export",
            recipe=recipe_values(replace(plan.native.recipe, to="gguf")),
            seed=None,
            sources=(read_provenance(native) or {})["sources"],
            weights_hash=None,
            extra={"family": plan.native.family, "why": plan.native.why, "gguf": {"outtype": plan.outtype}},
        )
        return (folder / plan.file).stat().st_size


def _card(plan: GgufPlan, out: Path) -> str:
    source = plan.native.checkpoint.name
    text = model_card(
        title=out.name,
        bases=[source],
        tags=["export", "gguf"],
        command=["moesaic", "export", source, str(out), "--to", "gguf"],
        facts={"Architecture": plan.native.family, "Because": plan.native.why, "Numbers": plan.outtype},
    )
    return f"{text}\n{fenced(f'llama-cli --model {plan.file}', language='bash')}\n"


def _check_possible(plan: GgufPlan) -> None:
    if plan.outtype != "f32":
        raise MoesaicError("--check of a GGUF file needs --dtype float32: llama.cpp rounds activations to 16 bits else")
    if importlib.util.find_spec("llama_cpp") is None:
        raise MoesaicError("--check of a GGUF file runs llama.cpp: install llama-cpp-python, or leave --check out")
