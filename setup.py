"""Put recipes/ into the wheel, as lorakit/assets/recipes, without a second copy here; all else is in pyproject.toml."""

import shutil
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py


class BuildWithRecipes(build_py):
    """setuptools finds no package data outside of a package's folder."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # which runs from the checkout, where recipes/ is
            target = Path(self.build_lib) / "lorakit" / "assets" / "recipes"
            shutil.copytree(
                Path(__file__).parent / "recipes", target, ignore=shutil.ignore_patterns("*.md"), dirs_exist_ok=True
            )


setup(cmdclass={"build_py": BuildWithRecipes})
