"""Build a base without reading its weights: every parameter on the meta device, with the source of its values.

transformers itself builds the model, from placeholders instead of stored tensors (lazy.py). So names, dtypes,
tied weights and missing tensors are as in ``load_base``, whatever transformers renames or merges while it loads.
"""

from functools import partial
from pathlib import Path
from typing import Any, Final, final

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lorakit.base._internals import model_factory, without_zero3
from lorakit.base.lazy import StoredTensor, TracedTensor, WeightSource, equal_sources, read_stored, source_of, traced
from lorakit.base.transformers_io import check_complete, load_skeleton, quiet_loading, read_generation_config
from lorakit.errors import BaseModelError
from lorakit.files.base_files import BaseFiles, open_base_files
from lorakit.files.safetensors import TensorEntry
from lorakit.quant.files import dequantized_entries, quantized_entries

WAY_OUT: Final = "use backend single, ddp or zero2 and a base that is not quantised, which load full tensors"
UNREADABLE: Final = ("quantization_config", "transformers_weights")


def load_on_meta(folder: Path, dtype: torch.dtype) -> nn.Module:
    """Build the model of ``load_base`` without its weights: parameters on meta, buffers with values on the CPU.

    A weight that the files hold quantised is a parameter of its dequantised shape.
    Raises BaseModelError: as ``load_base``; and for a parameter whose source is unknown.
    """
    files = open_base_files(folder)
    model, report = _build_from_placeholders(files, dtype)
    check_complete(folder, model, report)
    with torch.no_grad():
        for name, buffer in list(model.named_buffers(remove_duplicate=False)):
            if buffer.is_meta:  # read now, because engines shard and fill parameters only
                _set_tensor(model, name, _known_source(files, name, buffer).read_full(partial(read_stored, files)))
        _tie_equal_weights(model, files)
        for name, parameter in model.named_parameters():  # traced ones become plain ones; tied ones stay tied
            source = _known_source(files, name, parameter)
            plain = nn.Parameter(torch.empty(source.shape, dtype=source.dtype, device="meta"), parameter.requires_grad)
            vars(plain).update(vars(parameter))  # the source, and transformers' own marks
            torch.utils.swap_tensors(parameter, plain)
    return model.eval()


def check_stored_tensors(folder: Path) -> None:
    """Raise BaseModelError if the files lack tensors of the causal language model. No weight is read."""
    files = open_base_files(folder)
    load_skeleton(folder)  # for its error
    quantized_entries(files)  # for its error
    try:
        model, report = _build_from_placeholders(files, torch.float32)
    except BaseModelError:  # a base that cannot be loaded in parts: a full load decides
        return
    check_complete(folder, model, report)


@final
class _Placeholder:
    """Stands for one stored tensor. transformers slices it with ``[...]`` and calls ``.to(device=..., dtype=...)``."""

    def __init__(self, name: str, entry: TensorEntry) -> None:
        self._name = name
        self._entry = entry

    def __getitem__(self, index: Any) -> "_Placeholder":
        assert index is Ellipsis, index  # a real slice would read another shape than the stored one
        return self

    def to(self, device: object = None, dtype: torch.dtype | None = None) -> TracedTensor:
        return traced(StoredTensor(self._entry.shape, dtype or self._entry.dtype, self._name))


class _MissingStaysOnMeta(TorchFunctionMode):
    """Keep missing parameters on meta, for an error instead of random values, which might fill the memory first."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.empty_like and isinstance(args[0], nn.Parameter):
            kwargs = {**kwargs, "device": "meta"}
        return func(*args, **kwargs)


def _build_from_placeholders(files: BaseFiles, dtype: torch.dtype) -> tuple[nn.Module, dict[str, Any]]:
    """Return the causal language model that transformers builds from placeholders, and its report.

    Keys of the report: ``missing_keys`` (names) and ``mismatched_keys`` (name, stored shape, shape in the model).
    Raises BaseModelError: an unknown architecture, or one that does more to tensors than rearrange them.
    """
    folder = files.folder
    quantized = quantized_entries(files)
    placeholders = {name: _Placeholder(name, entry) for name, entry in dequantized_entries(files, quantized).items()}
    with quiet_loading(), without_zero3(), _MissingStaysOnMeta():
        skeleton = load_skeleton(folder)
        config: Any = skeleton.config
        if quantized:  # because transformers would replace the linear layers by its own
            vars(config).pop("quantization_config", None)
        for key in UNREADABLE:
            if getattr(config, key, None) is not None:
                raise BaseModelError(f"{folder}: config.json has {key}, which cannot be loaded in parts; {WAY_OUT}")
        try:
            # no folder (None), so that transformers reads tensors from state_dict instead of files; mismatched sizes
            # are ignored here, because check_complete reports them together with the file that holds them
            model, report = type(skeleton).from_pretrained(  # type: ignore[attr-defined]
                None,
                **model_factory(config)[1],
                config=config,
                state_dict=placeholders,
                dtype=dtype,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                local_files_only=True,
                trust_remote_code=False,
            )
            # transformers sets these only for a model that it loads from a folder
            model.name_or_path = model.config.name_or_path = str(folder)
            if model.can_generate():
                model.generation_config = type(model.generation_config)(**read_generation_config(folder))
        except Exception as problem:  # because transformers' own code fails in many ways on a user's files
            reason = f"{type(problem).__name__}: {problem}"
            raise BaseModelError(f"{folder}: transformers cannot load it in parts: {reason}; {WAY_OUT}") from None
    return model, report


def _tie_equal_weights(model: nn.Module, files: BaseFiles) -> None:
    """Tie weights that the config ties and files hold twice, if equal; transformers has no values to compare here."""
    ties: dict[str, str] = model.all_tied_weights_keys  # type: ignore[assignment]  # target -> source, not a copy
    parameters = dict(model.named_parameters(remove_duplicate=False))
    for target, source in list(ties.items()):
        one = parameters.get(target)
        other = parameters.get(source)
        if one is other or one is None or other is None:
            continue
        if equal_sources(files, source_of(one), source_of(other)):
            _set_tensor(model, target, other)
        else:
            ties.pop(target)


def _set_tensor(model: nn.Module, name: str, tensor: Tensor) -> None:
    module, _, key = name.rpartition(".")
    setattr(model.get_submodule(module), key, tensor)


def _known_source(files: BaseFiles, name: str, tensor: Tensor) -> WeightSource:
    source = source_of(tensor)
    if source is None:
        raise BaseModelError(f"{files.folder}: {name} is not put together from stored tensors in known ways; {WAY_OUT}")
    return source
