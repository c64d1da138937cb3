"""Loading and generating: what is refused, and that results are reproducible."""

import json
import re
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moesaic.checkpoint.record import write_provenance
from moesaic.common.errors import MoesaicError
from moesaic.generation import generate
from moesaic.loading import load, load_tokenizer, pick_device, pick_dtype
from moesaic.routing.config import RuleConfig
from moesaic.routing.install import find_installation, install
from moesaic.upcycling.recipe import UpcycleRecipe
from moesaic.upcycling.run import upcycle
from tests.tiny_models import VOCABULARY, save_tiny, tiny_model
from tests.tiny_moes import EXPERTS, save_tiny_moe


@pytest.fixture
def checkpoint(tmp_path):
    """A tiny dense model with a token for every printable character."""
    folder = save_tiny(tmp_path / "model", "llama")
    characters = {chr(32 + index): index for index in range(VOCABULARY - 1)} | {"<unk>": VOCABULARY - 1}
    tokenizer = Tokenizer(models.WordLevel(characters, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.decoder = decoders.Fuse()  # pyright: ignore[reportAttributeAccessIssue]
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


def change_weights(folder, change):
    file = folder / "model.safetensors"
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file, metadata={"format": "pt"})


def change_config(folder, **changes):
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def refusal(call, *arguments, **keywords):
    with pytest.raises(MoesaicError) as error:
        call(*arguments, **keywords)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_load_gives_the_same_model_in_evaluation_mode(checkpoint):
    model = load(checkpoint, device="cpu")
    assert not model.training
    expected = tiny_model("llama").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())
    assert load(checkpoint, dtype="bfloat16").dtype == torch.bfloat16


def test_missing_tensors_are_not_drawn_at_random(checkpoint):
    name = "model.layers.1.mlp.up_proj.weight"
    change_weights(checkpoint, lambda tensors: tensors.pop(name))
    message = f"{checkpoint}: has no tensor for {name}; the file is incomplete or its config.json is another's"
    assert refusal(load, checkpoint) == message


def test_tensors_of_another_shape_are_not_drawn_at_random(checkpoint):
    change_config(checkpoint, intermediate_size=24)
    assert "has a tensor of another shape for model.layers.0.mlp.down_proj.weight" in refusal(load, checkpoint)
    assert "and 3 more" in refusal(load, checkpoint)


def test_tensors_that_the_model_does_not_use_are_named(checkpoint, capsys):
    change_weights(checkpoint, lambda tensors: tensors.update({"model.layers.1.adapter.weight": torch.zeros(2)}))
    load(checkpoint)
    assert "does not use model.layers.1.adapter.weight" in capsys.readouterr().err


def test_the_routing_rule_that_training_recorded_is_installed_again(tmp_path):
    folder = save_tiny_moe(tmp_path / "moe", "qwen3_moe")
    assert find_installation(load(folder)) is None
    config = RuleConfig(rule="document_pool", pool_size=4)
    bias = torch.arange(2 * EXPERTS, dtype=torch.float32).view(2, EXPERTS) / 100
    record = install(load(folder), config, selection_bias=bias).to_record()
    write_provenance(folder, verb="train", recipe={}, seed=0, sources=[], weights_hash="0", extra={"routing": record})
    installation = find_installation(load(folder))
    assert installation is not None
    assert installation.config == config
    assert installation.selection_bias is not None
    assert torch.equal(installation.selection_bias, bias)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "brandnew"}, "model_type 'brandnew' in config.json is unknown to transformers"),
        ({"model_type": None}, "model_type None in config.json is unknown to transformers"),
        ({"model_type": "vit"}, "model_type 'vit' is not a causal language model"),
    ],
)
def test_other_architectures_are_refused(checkpoint, changes, message):
    change_config(checkpoint, **changes)
    assert message in refusal(load, checkpoint)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_size": "x"}, "StrictDataclassFieldValidationError: .*'hidden_size' expected int, got str"),
        ({"num_attention_heads": 5}, "The hidden size .32. is not a multiple of the number of attention heads"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"hidden_act": "foo"}, "KeyError: 'foo'"),
    ],
)
def test_bad_values_in_the_config_are_named_with_the_file(checkpoint, changes, reason):
    change_config(checkpoint, **changes)
    message = refusal(load, checkpoint)
    assert message.startswith(f"{checkpoint / 'config.json'}: transformers cannot use a value in it (")
    assert re.search(reason, message)


def test_more_active_experts_than_there_are_is_one_line(tmp_path):
    save_tiny(tmp_path / "base", "llama")
    recipe = UpcycleRecipe(base=str(tmp_path / "base"), method="virtual_group", experts=8)
    upcycle(recipe, tmp_path / "moe", quiet=True, workers=1)
    change_config(tmp_path / "moe", num_experts_per_tok=9)
    assert "moe/config.json: transformers cannot use a value in it (ValueError: num_experts_per_tok is 9" in refusal(
        load, tmp_path / "moe"
    )


@pytest.mark.parametrize("device", ["gpu", "cpu:x", ""])
def test_unknown_device(device):
    assert refusal(pick_device, device) == f"--device {device}: not a device; use cpu, cuda or cuda:INDEX"


def test_device_that_is_not_there(monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert pick_device("cuda:0") == torch.device("cuda:0")
    assert refusal(pick_device, "cuda:1") == "--device cuda:1: this machine has 1 CUDA devices; use cpu"


def test_device_by_default(monkeypatch):
    for available, name in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        assert pick_device(None) == torch.device(name)


def test_dtype():
    assert pick_dtype(None) == pick_dtype("auto") == "auto"
    assert pick_dtype("float16") == pick_dtype(torch.float16) == torch.float16
    assert refusal(pick_dtype, "int8") == "--dtype int8: not one of auto, float32, bfloat16, float16"


def test_greedy_generation_is_the_likeliest_token_every_time(checkpoint):
    text = generate(checkpoint, "hi", max_new_tokens=5, device="cpu")
    model, tokenizer = load(checkpoint, device="cpu"), load_tokenizer(checkpoint)
    ids = tokenizer("hi", return_tensors="pt")["input_ids"]
    assert isinstance(ids, torch.Tensor)
    for _ in range(len(text)):
        likeliest = model(input_ids=ids).logits[0, -1].argmax().view(1, 1)
        ids = torch.cat([ids, likeliest], dim=1)
    assert tokenizer.decode(ids[0]) == f"hi{text}"
    assert 1 <= len(text) <= 5


def test_sampling_depends_on_the_seed_alone(checkpoint):
    def draw(seed):
        return generate(checkpoint, "hi", max_new_tokens=12, temperature=1.5, seed=seed)

    before = torch.random.get_rng_state()
    first = draw(1)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.manual_seed(5)
    assert draw(1) == first
    assert draw(2) != first


def test_settings_of_the_checkpoint_do_not_matter(checkpoint):
    expected = generate(checkpoint, "hi", max_new_tokens=6)
    settings = {"do_sample": True, "temperature": 9.0, "top_p": 0.5, "eos_token_id": [2, 3], "repetition_penalty": 2.0}
    (checkpoint / "generation_config.json").write_text(json.dumps(settings))
    assert generate(checkpoint, "hi", max_new_tokens=6) == expected


def test_streaming_prints_prompt_and_text(checkpoint, capsys):
    text = generate(checkpoint, "hi", max_new_tokens=4, stream=True)
    assert capsys.readouterr().out == f"hi{text}\n"


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"max_new_tokens": 0}, "--max-new-tokens: must be at least 1, got 0"),
        ({"temperature": -0.5}, "--temperature: must be 0 or more, got -0.5"),
        ({"temperature": float("nan")}, "generate(): temperature: expected a finite number, got nan"),
    ],
)
def test_arguments_out_of_range(keywords, message):
    assert refusal(generate, "nowhere", "hi", **keywords) == message


@pytest.mark.parametrize("key", ["bos_token_id", "eos_token_id", "pad_token_id"])
@pytest.mark.parametrize("ids", [[None], [], "2", 1.5, [[2]], {"a": 1}, True])
def test_token_ids_of_the_generation_config_are_numbers(checkpoint, key, ids):
    (checkpoint / "generation_config.json").write_text(json.dumps({key: ids}))
    expected = rf"generation_config.json: {key} is .*, but must be a token id or a list of token ids"
    assert re.search(expected, refusal(generate, checkpoint, "hi"))


def test_empty_prompt(checkpoint):
    assert refusal(generate, checkpoint, "").startswith("PROMPT: is empty, and this tokenizer has no start token")


def test_an_empty_prompt_is_refused_before_the_model_is_loaded(checkpoint):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("moesaic.loading.load", lambda *_, **__: pytest.fail("the model was loaded"))
        assert refusal(generate, checkpoint, ["hi", ""]).startswith("PROMPT: is empty")
        assert refusal(generate, checkpoint, []).startswith("PROMPT: none is given")


@pytest.mark.parametrize("batch_size", [2, 3, 8])
def test_a_batch_gives_the_same_as_one_at_a_time(checkpoint, batch_size):
    prompts = ["hi", "a much longer prompt than that", "x", "hello there", "hi"]
    alone = [generate(checkpoint, prompt, max_new_tokens=8, dtype="float32") for prompt in prompts]
    assert len(set(alone)) > 2
    assert generate(checkpoint, prompts, max_new_tokens=8, dtype="float32", batch_size=batch_size) == alone


def test_a_text_that_ends_early_in_a_batch_is_cut_there(checkpoint):
    prompts = ["hi", "a much longer prompt than that"]
    tokenizer = load_tokenizer(checkpoint)
    first = generate(checkpoint, prompts[0], max_new_tokens=4)
    end = tokenizer(first)["input_ids"][1]  # the second token that follows "hi" ends a text from now on
    change_config(checkpoint, eos_token_id=end)
    settings = {"eos_token_id": end, "pad_token_id": 5}
    (checkpoint / "generation_config.json").write_text(json.dumps(settings))
    alone = [generate(checkpoint, prompt, max_new_tokens=8) for prompt in prompts]
    assert len(alone[0]) < 8
    assert generate(checkpoint, prompts, max_new_tokens=8, batch_size=2) == alone


def test_a_tie_that_the_file_breaks_is_said(checkpoint, capsys):
    load(checkpoint)
    assert "ties the output head" not in capsys.readouterr().err
    change_config(checkpoint, tie_word_embeddings=True)
    load(checkpoint)
    assert "config.json ties the output head to the embedding, but the file has a head" in capsys.readouterr().err


@pytest.mark.parametrize("model_type", ["llama", "qwen2"])
def test_no_tokenizer(checkpoint, model_type):
    change_config(checkpoint, model_type=model_type)
    (checkpoint / "tokenizer.json").unlink()
    (checkpoint / "tokenizer_config.json").unlink()
    assert "has no usable tokenizer" in refusal(generate, checkpoint, "hi")


def test_tokenizer_of_another_model(checkpoint):
    change_config(checkpoint, vocab_size=50)

    def cut(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = tensors[name][:50].clone()

    change_weights(checkpoint, cut)
    assert "its tokenizer gives token 73, but the model has only 50" in refusal(generate, checkpoint, "hi")


def test_no_remote_code_runs(checkpoint):
    change_config(checkpoint, model_type="brandnew", auto_map={"AutoModelForCausalLM": "evil.Model"})
    (checkpoint / "evil.py").write_text("raise SystemExit('ran')")
    assert "unknown to transformers" in refusal(load, checkpoint)
    assert "evil" not in sys.modules


@pytest.mark.filterwarnings("ignore:Cannot enable progress bars")
def test_no_bar_of_a_library_is_shown(tmp_path, monkeypatch):
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    folder, seen = save_tiny(tmp_path / "model", "llama"), []
    real = AutoModelForCausalLM.from_pretrained

    def watched(*arguments, **keywords):
        seen.append(logging.is_progress_bar_enabled())
        return real(*arguments, **keywords)

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", watched)
    logging.enable_progress_bar()
    load(folder)
    assert seen == [False]
    assert logging.is_progress_bar_enabled()
