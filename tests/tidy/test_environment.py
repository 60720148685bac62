"""Names of ours that others might take for theirs: the folders beside packages of the same name."""

from __future__ import annotations

import subprocess
import sys

from tests.tidy.source import PACKAGES, ROOT


def test_transformers_does_not_take_our_kernels_for_the_hub_package() -> None:
    """With our `kernels/` in front, transformers imports cleanly and finds no hub kernels."""
    program = (
        "import kernels, transformers\n"
        "from transformers.utils import is_kernels_available\n"
        "assert is_kernels_available() is False\n"
        "assert kernels.__version__ == '0', kernels.__version__\n"
        "print(kernels.__file__)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False, timeout=110
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.strip().splitlines()[-1] == str(ROOT / "kernels" / "__init__.py")


def test_importing_kernels_loads_no_heavy_package() -> None:
    """`kernels/__init__.py` stays light: a probe of that name by another package costs nothing."""
    program = "import sys, kernels; print(sorted({'torch', 'triton', 'transformers', 'numpy'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_no_installed_package_has_a_name_of_ours() -> None:
    """Nothing in the environment but this checkout provides a package with the name of one of our folders."""
    program = (
        "import importlib.metadata as m\n"
        f"ours = {set(PACKAGES)!r}\n"
        "for name, owners in m.packages_distributions().items():\n"
        "    strangers = set(owners) - {'bandmaster'}\n"
        "    if name in ours and strangers: print(name, strangers)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
