"""Run a checkpoint's decoder layers one after the other over all sequences, with one layer's weights in memory.

So a checkpoint larger than memory can be run: the model is built without memory (meta device), a layer's tensors are
read when its turn comes and dropped after it; experts are read right into their places in the stacked parameters. What
is kept is the hidden states of all sequences.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Int64
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import convert_and_load_state_dict_in_model
from transformers.modeling_utils import LoadStateDictConfig

from moesaic.checkpoint.lazy import Lazy, Region
from moesaic.checkpoint.pio import opened, read_into
from moesaic.checkpoint.reader import TORCH_DTYPES, read_tensor
from moesaic.checkpoint.source import Checkpoint
from moesaic.common.errors import MoesaicError
from moesaic.common.numbers import NotFiniteError
from moesaic.common.progress import no_library_bars
from moesaic.families.moe import MoELayerTensors, detect_running
from moesaic.loading import explained_errors, load_config
from moesaic.modeling.finite import first_not_finite, is_finite
from moesaic.routing.capture import find_block, replaced_forward
from moesaic.routing.restrict import install_recorded
from moesaic.selection.slots import expert_part

_META = torch.device("meta")

_PARAMETERS = {
    "gate_up_proj": "gate_up",
    "up_proj": "up",
    "down_proj": "down",
    "gate_up_proj_bias": "gate_up_bias",
    "down_proj_bias": "down_bias",
}
"""Parameter of an experts module -> role of its slots."""

_ROLES = frozenset((*_PARAMETERS.values(), "gate", "gate_bias", "up_bias"))
"""Those that are read right into their places; transformers' own conversion reads the others (a reordered matrix)."""


@dataclass(eq=False)
class Batch:
    """Some sequences, padded on the right, on their way through the layers."""

    ids_BS: Int64[Tensor, "sequences length"]
    mask_T: Bool[Tensor, " tokens"]
    """False for padding; tokens are the sequences' positions, row by row."""
    hidden_BSD: Tensor | None = None
    arguments: list[tuple[tuple[Any, ...], dict[str, Any]]] | None = None
    """What each layer is called with beside hidden states: positions, rotary embeddings, masks of the layer's kind."""


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedLayer:
    """One decoder layer with its weights."""

    index: int
    module: nn.Module
    name: str
    """Of the checkpoint."""

    def run(self, batch: Batch) -> Tensor:
        """The layer's output for a batch, without changing the batch.

        Raises:
            NotFiniteError: it has NaN or infinity.
        """
        output_BSD = self._call(batch)
        if not is_finite(output_BSD):
            found = first_not_finite(self.module, lambda: self._call(batch), within=f"layers.{self.index}")
            raise NotFiniteError(f"{self.name}: {found or f'layer {self.index} gives NaN or infinity'}")
        return output_BSD

    def _call(self, batch: Batch) -> Tensor:
        assert batch.arguments is not None, "batches are prepared first"
        more, keywords = batch.arguments[self.index]
        output = self.module(batch.hidden_BSD, *more, **keywords)
        return output[0] if isinstance(output, tuple) else output


class StreamedModel:
    """A checkpoint as a model without weights, and the means to load parts of it."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        config = load_config(checkpoint.path, checkpoint.name)
        dtype = getattr(config, "dtype", None) or torch.float32
        with _META, explained_errors(f"{checkpoint.path / 'config.json'}: transformers cannot use a value in it"):
            model: Any = AutoModelForCausalLM.from_config(config, dtype=dtype, trust_remote_code=False)
        self._checkpoint = checkpoint
        self._dtype = dtype
        self._model: PreTrainedModel = model.eval()
        self._base: Any = model.base_model
        self._conversions: list[Any] = list(get_model_conversion_mapping(model))
        self._moe_layers = {layer.layer: layer for layer in detect_running(checkpoint).layers}
        self._stacked = {
            name
            for layer in self._moe_layers.values()
            for tensor in layer.expert_tensors
            if tensor.role in _ROLES
            for name in tensor.names(layer.num_experts)
        }
        self._fill_buffers()
        install_recorded(model, checkpoint.path)

    @torch.inference_mode()
    def layers(self, batches: Sequence[Batch], step: Callable[[LoadedLayer], None]) -> None:
        """Take all batches through all layers; `step` gets each layer and must advance every batch's hidden states."""
        self._embed(batches)
        stacks = ExpertStacks(self._checkpoint)
        for index, module in enumerate(self._base.layers):
            if index in self._moe_layers:
                block = find_block(module)
                assert block is not None, index
                stacks.fill(block.experts, self._moe_layers[index])
            self._load(lambda name, index=index: f".layers.{index}." in f".{name}", module)
            step(LoadedLayer(index=index, module=module, name=self._checkpoint.name))
            module.to_empty(device=_META)

    def _embed(self, batches: Sequence[Batch]) -> None:
        """Run the model up to its first layer, and record what each layer would be called with."""
        around = [child for child in self._base.children() if child is not self._base.layers]
        self._load(lambda name: ".layers." not in f".{name}" and not name.startswith("lm_head."), *around)
        for batch in batches:
            with _recording(self._base.layers) as calls:
                try:
                    # No attention mask: padding is on the right, where a causal model cannot see it.
                    self._base(input_ids=batch.ids_BS, use_cache=False)
                except ValueError as error:  # of taking apart what a layer gives
                    raise MoesaicError(
                        f"{self._checkpoint.name}: layers of {self._base.config.model_type} hand on more than hidden "
                        "states, so they cannot be run one at a time; use --method random"
                    ) from error
                except _RecordedError:
                    batch.hidden_BSD = calls[0][0]
                    batch.arguments = [(more, keywords) for _, more, keywords in calls]
        for module in around:
            module.to_empty(device=_META)

    def _load(self, wanted: Callable[[str], bool], *modules: nn.Module) -> None:
        """Read the tensors whose names are wanted, experts apart, and require that `modules` are then complete."""
        state = {
            name: read_tensor(info)
            for name, info in self._checkpoint.tensors.items()
            if wanted(name) and name not in self._stacked
        }
        config = LoadStateDictConfig(
            dtype=self._dtype,
            dtype_plan=self._model._get_dtype_plan(self._dtype),
            weight_mapping=self._conversions,
        )
        with no_library_bars():
            convert_and_load_state_dict_in_model(self._model, state, config)
        for module in modules:
            for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
                if tensor.device == _META:
                    raise MoesaicError(
                        f"{self._checkpoint.name}: has no tensor for {name} of a {type(module).__name__}; the file is "
                        "incomplete or its config.json is another's"
                    )

    def _fill_buffers(self) -> None:
        """Compute what is in no file: rotary frequencies, scales of embeddings."""
        for module in self._model.modules():
            names = module._non_persistent_buffers_set
            for name in names:
                buffer = module._buffers[name]
                if buffer is not None:
                    module._buffers[name] = torch.empty_like(buffer, device="cpu")
            if names:
                self._model._init_weights(module)


class _RecordedError(Exception):
    """The last layer was reached: the rest of the model is not needed."""


@contextmanager
def _recording(layers: nn.ModuleList) -> Iterator[list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]]]:
    """Have the layers record what they are called with, and pass their input on."""
    calls: list[tuple[Tensor, tuple[Any, ...], dict[str, Any]]] = []

    def record(hidden_BSD: Tensor, *more: Any, **keywords: Any) -> Tensor:
        calls.append((hidden_BSD, more, keywords))
        if len(calls) == len(layers):
            raise _RecordedError
        return hidden_BSD

    with ExitStack() as stack:
        for layer in layers:
            stack.enter_context(replaced_forward(layer, record))
        yield calls


def make_batches(sequences: Sequence[Sequence[int]], *, size: int, padding_id: int) -> Iterator[Batch]:
    """Batches of `size` sequences in the order given, padded on the right to the longest of the batch."""
    for start in range(0, len(sequences), size):
        part = sequences[start : start + size]
        length = max(map(len, part))
        ids_BS = torch.full((len(part), length), padding_id, dtype=torch.int64)
        mask_BS = torch.zeros(len(part), length, dtype=torch.bool)
        for row, ids in enumerate(part):
            ids_BS[row, : len(ids)] = torch.tensor(ids, dtype=torch.int64)
            mask_BS[row, : len(ids)] = True
        yield Batch(ids_BS=ids_BS, mask_T=mask_BS.reshape(-1))


class ExpertStacks:
    """Memory for the experts of one layer, used again for the next: nothing is in memory twice, nothing is freed."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self._memory: dict[str, Tensor] = {}

    def fill(self, experts: Any, layer: MoELayerTensors) -> None:
        """Give an experts module its weights; what another layer's module was given before is lost."""
        for name, role in _PARAMETERS.items():
            parameter = getattr(experts, name, None)
            if parameter is None or expert_part(self._checkpoint, layer, role, 0) is None:
                continue
            stack = self._memory.get(name)
            if stack is None or (stack.shape, stack.dtype) != (parameter.shape, parameter.dtype):
                stack = self._memory[name] = torch.empty(parameter.shape, dtype=parameter.dtype)
            for expert, target in enumerate(stack):
                self._fill_one(target, layer, role, expert)
            setattr(experts, name, nn.Parameter(stack, requires_grad=False))

    def _fill_one(self, target: Tensor, layer: MoELayerTensors, role: str, expert: int) -> None:
        part = expert_part(self._checkpoint, layer, role, expert)
        if part is None or part.size != target.numel():
            raise MoesaicError(
                f"{self._checkpoint.name}: expert {expert} of layer {layer.layer} does not have the "
                f"{list(target.shape)} values for {role} that its config.json says"
            )
        _read(part, target.view(-1))


def _read(part: Lazy, values_N: Tensor) -> None:
    """Read stored numbers into their place: in the same dtype right from the file, without a copy in between."""
    made = any(source.codes is not None for source in part.sources)
    if made or TORCH_DTYPES.get(part.dtype) != values_N.dtype:
        values_N.copy_(part.read())
        return
    place = values_N.view(torch.uint8).numpy().data
    for piece in part.pieces:
        assert isinstance(piece, Region), "experts are stored"
        with opened(piece.source.file) as fd:
            read_into(fd, place[: piece.width], piece.source.offset + piece.start, piece.source.file)
        place = place[piece.width :]
