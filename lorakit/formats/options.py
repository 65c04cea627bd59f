"""What the caller says beyond the file: the base it belongs to, an alpha, a prefix."""

from dataclasses import dataclass

from lorakit.base.load import find_base, load_skeleton
from lorakit.errors import PatchError
from lorakit.patch import BaseShapes


@dataclass(frozen=True)
class Base:
    """The names and shapes of a base; no weights are loaded."""

    name: str
    revision: str | None
    shapes: BaseShapes
    modules: tuple[str, ...]
    """every module's name, adaptable or not"""


@dataclass(frozen=True)
class Options:
    """The arguments of ``convert`` that readers and writers look at."""

    base: Base | None = None
    alpha: float | None = None
    """of a file that does not hold it"""
    prefix: str | None = None
    """before every name in the file; None lets the file say"""


def open_base(name: str | None, revision: str | None) -> Base | None:
    """The base of that name, or None when none is named.

    Raises:
        BaseModelError: there is no such base. PatchError: a revision of nothing.
    """
    if name is None:
        if revision is not None:
            raise PatchError(f"revision: {revision!r} of no base; name the base too (base=)")
        return None
    skeleton = load_skeleton(find_base(name, revision))
    modules = tuple(module for module, _ in skeleton.named_modules())
    return Base(name, revision, BaseShapes.of(skeleton), modules)
