"""transformers' own model tests on our architecture: `python -m interop.transformers_tests [FOLDER [-k EXPRESSION]]`.

FOLDER (default `.interop/transformers`) is a checkout of transformers' public repository at the installed version or
near it, of which `tests/` and `utils/` are used: the common, generation, causal-LM, pipeline and training tests. `make
interop` gets one where it can. Without it there is nothing to run, which is said, and the status is 0.

Ours are Llama, Qwen3 and Gemma 3, with plain top-k and with one expert per group. A test may fail on ours where it
fails on a control, as transformers has them: the dense base, or a mixture of experts of its kind (Qwen3-MoE; Gemma 4
with experts, which Gemma's norms follow as well). Each other failure is marked, and the status is 1. The random
numbers of each test are seeded.
"""

import os
import sys
import unittest
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

NEEDED = ("test_modeling_common.py", "causal_lm_tester.py", "generation/test_utils.py")
BASES = {"Llama": "Qwen3Moe", "Qwen3": "Qwen3Moe", "Gemma3Text": "Gemma4Text"}
"""Stem of a base's model -> that of transformers' mixture of its kind."""
CAUSAL = {"Gemma3Text": "Gemma3", "Gemma4Text": "Gemma4"}
"""Stem of a model -> that of its causal-LM class, where it is another."""
SETTINGS: dict[str, dict[str, Any]] = {
    "Gemma4Text": {
        "enable_moe_block": True,
        "top_k_experts": 2,
        "hidden_size_per_layer_input": 0,
        "layer_types": ["full_attention", "full_attention"],
        "global_head_dim": 16,
        "num_global_key_value_heads": 2,
    }
}
"""What transformers' tester does not set by itself."""
RULES: dict[str, dict[str, Any]] = {
    "topk": {},
    "one_per_group": {"routing_rule": "one_per_group", "expert_groups": [0, 0, 1, 1, 2, 2, 3, 3]},
}
CLASSES = {
    "Config": "config_class",
    "Model": "base_model_class",
    "ForCausalLM": "causal_lm_class",
    "ForSequenceClassification": "sequence_classification_class",
    "ForTokenClassification": "token_classification_class",
    "ForQuestionAnswering": "question_answering_class",
}
"""End of a class' name -> attribute of transformers' tester."""


class Outcomes:
    """A plugin of pytest that keeps what became of each test: model -> test -> outcome."""

    def __init__(self) -> None:
        self.of: dict[str, dict[str, str]] = defaultdict(dict)

    def pytest_runtest_setup(self) -> None:
        """The same numbers whichever tests run."""
        from tests.test_modeling_common import global_rng  # pyright: ignore[reportMissingImports]
        from transformers import set_seed

        set_seed(0)
        global_rng.seed(0)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Keep the outcome of the call, or of a set-up that failed or skipped; a test with a failed part has failed."""
        if report.when == "call" or report.outcome != "passed":
            _, model, test = report.nodeid.rsplit("::", 2)
            if self.of[model].get(test) != "failed":
                self.of[model][test] = report.outcome


def cases_of_tests() -> dict[str, type]:
    """A test case for each base and rule, and for each control; call it where `tests` is transformers'."""
    import transformers
    from tests.causal_lm_tester import (  # pyright: ignore[reportMissingImports]
        CausalLMModelTest,
        CausalLMModelTester,
    )

    from moesaic.modeling import modeling_moesaic

    def case(name: str, attributes: dict[str, Any]) -> type:
        tester = type(f"{name}Tester", (CausalLMModelTester,), attributes)
        body = {"model_tester_class": tester, "__module__": __name__}
        return type(name, (CausalLMModelTest, unittest.TestCase), body)

    cases = {}
    for stem in dict.fromkeys((*BASES, *BASES.values())):
        named = {"base_model_class": f"{stem}Model", "causal_lm_class": f"{CAUSAL.get(stem, stem)}ForCausalLM"}
        theirs = {key: getattr(transformers, name) for key, name in named.items()}
        cases[f"control_{stem}"] = case(f"control_{stem}", theirs | SETTINGS.get(stem, {}))
        for rule, values in RULES.items() if stem in BASES else ():
            ours = {key: getattr(modeling_moesaic, f"Moesaic{stem}{kind}") for kind, key in CLASSES.items()}
            cases[f"{stem}_{rule}"] = case(f"{stem}_{rule}", ours | values)
    return cases


def missing(folder: Path) -> list[str]:
    """What the tests need and the folder lacks."""
    return [f"tests/{name}" for name in NEEDED if not (folder / "tests" / name).is_file()]


def main(arguments: list[str]) -> int:
    """Run them; print a line for each model and for each finding."""
    import pytest

    folder = Path(arguments[0] if arguments else ".interop/transformers").resolve()
    if lacking := missing(folder):
        print(f"skipped: {folder} has no {', '.join(lacking)}, which are in transformers' public repository")
        return 0
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    outcomes = Outcomes()
    options = ["-q", "-p", "no:cacheprovider", "-c", os.devnull, "--rootdir", str(folder), "--tb=line", "--noconftest"]
    pytest.main([*options, *arguments[1:], __file__], plugins=[outcomes])
    findings = 0
    for model, tests in sorted(outcomes.of.items()):
        counts = Counter(tests.values())
        print(f"{model}: {counts['passed']} passed, {counts['skipped']} skipped, {counts['failed']} failed")
        base = model.split("_")[0]
        controls = [outcomes.of[f"control_{stem}"] for stem in (base, BASES.get(base)) if base in BASES]
        for test in sorted(test for test, outcome in tests.items() if outcome == "failed"):
            new = bool(controls) and all(control.get(test) != "failed" for control in controls)
            findings += new
            print(f"  {test}" + (" (on no control)" if new else ""))
    return int(findings > 0 or not outcomes.of)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))

if "pytest" in sys.modules and not missing(Path.cwd()):
    globals().update(cases_of_tests())
