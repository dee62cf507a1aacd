"""Counts the arithmetic of matrix products, by standing in for the functions that form them."""

from collections.abc import Callable
from types import ModuleType
from typing import Any
from unittest import mock


def operations(backend: ModuleType, work: Callable[[], Any]) -> int:
    """Multiplications and additions of all products that `work` has formed by those of a module."""
    counted = 0

    def counting(function: Callable[..., None]) -> Callable[..., None]:
        def call(out: Any, a: Any, b: Any) -> None:
            nonlocal counted
            counted += 2 * a.shape[0] * a.shape[1] * b.shape[1]
            function(out, a, b)

        return call

    with (
        mock.patch.object(backend, "matmul_into", counting(backend.matmul_into)),
        mock.patch.object(backend, "add_matmul", counting(backend.add_matmul)),
    ):
        work()
    return counted
