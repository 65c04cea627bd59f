"""Tensors of a patch that are read from its file when they are asked for."""

from collections.abc import Iterator, Mapping

from torch import Tensor

from lorakit.errors import PatchError
from lorakit.files.safetensors import SafetensorsFile
from lorakit.patch.patch import is_finite


class LazyTensors(Mapping[str, Tensor]):
    """Tensors that are read from their file when they are asked for."""

    def __init__(self, file: SafetensorsFile, keys: Mapping[str, str]) -> None:
        self._file, self.keys_in_file = file, keys

    def __getitem__(self, name: str) -> Tensor:
        tensor = self._file.read(self.keys_in_file[name])
        if not is_finite(tensor):
            raise PatchError(f"{self._file.path}: {self.keys_in_file[name]} holds values that are not finite")
        return tensor

    def elements(self, name: str, start: int, stop: int) -> Tensor:
        """Elements of a flattened tensor; nothing else of it is read."""
        tensor = self._file.read_elements(self.keys_in_file[name], start, stop)
        if not is_finite(tensor):
            raise PatchError(f"{self._file.path}: {self.keys_in_file[name]} holds values that are not finite")
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_in_file)

    def __len__(self) -> int:
        return len(self.keys_in_file)
