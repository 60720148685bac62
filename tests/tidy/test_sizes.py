"""Files stay rooms that one can hold in the head, and functions fit a screen."""

from __future__ import annotations

import ast

from tests.tidy.source import Module, modules

FILE_LINES_MAX = 600
FUNCTION_LINES_MAX = 70


def test_no_file_is_too_long() -> None:
    """A file of more than 600 lines is split by idea."""
    wrong = [
        f"{module.path}: {lines} lines, at most {FILE_LINES_MAX}"
        for module in modules("allocator", "ipc", "journal", "kernels", "daemon", "tools", "tests")
        if (lines := module.text.count("\n")) > FILE_LINES_MAX
    ]
    assert not wrong, "\n".join(wrong)


def long_functions(module: Module) -> list[str]:
    """One line for each function above the limit, decorators and docstring included."""
    return [
        f"{module.path}:{node.lineno}: {node.name} has {lines} lines, at most {FUNCTION_LINES_MAX}"
        for node in module.functions()
        if (lines := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]


def test_functions_fit_a_screen() -> None:
    """No function outside the kernels is longer than 70 lines."""
    checked = modules("allocator", "ipc", "journal", "daemon", "tools", "tests")
    wrong = [line for module in checked for line in long_functions(module)]
    assert not wrong, "\n".join(wrong)


def test_every_module_says_what_it_owns() -> None:
    """Each module of product and tests opens with a docstring that ends its first line as a sentence."""
    everything = modules("allocator", "ipc", "journal", "kernels", "daemon", "tools", "tests")
    wrong = []
    for module in everything:
        text = ast.get_docstring(module.tree)
        if not text:
            wrong.append(f"{module.path}: no docstring")
        elif module.name.partition(".")[0] != "tests" and module.path.name != "__init__.py" and "\n" not in text:
            wrong.append(f"{module.path}: the docstring is one line; say what it owns and what it must never do")
    assert not wrong, "\n".join(wrong)


def test_public_things_have_docstrings() -> None:
    """Every public class and module-level function of the product, and every test, has a docstring."""
    wrong = []
    for module in modules("allocator", "ipc", "journal", "kernels", "daemon", "tools", "tests"):
        in_tests = module.name.startswith("tests")
        for node in module.tree.body:
            if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                continue
            wanted = node.name.startswith("test_") if in_tests else not node.name.startswith("_")
            if wanted and not ast.get_docstring(node):
                wrong.append(f"{module.path}:{node.lineno}: {node.name} has no docstring")
    assert not wrong, "\n".join(wrong)
