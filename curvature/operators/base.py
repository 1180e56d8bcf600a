"""The base class of symmetric matrices over parameters, whose dense defaults are oracles for faster overrides."""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import reduce
from numbers import Integral
from os import PathLike
from typing import Any, TypeVar

import torch
from torch import Tensor

from curvature import linalg
from curvature.arguments import check_whole
from curvature.operators.space import (
    MAX_DIRECT_SIZE,
    Space,
    require_dense_size,
    warn_of_decomposition,
    warn_of_products,
)
from curvature.operators.storage import KINDS, restore, rounded_state, to_plain_data

T = TypeVar("T")
Given = TypeVar("Given", Tensor, dict[str, Tensor], Mapping[str, Tensor])  # a vector, returned in the form given
log = logging.getLogger("curvature")


class Operator(ABC):
    """A symmetric P x P matrix M on the flat vectors of a space.

    Vectors are flat (P,), columns (P, c), or dicts of tensors by parameter name; methods return the form that they are
    given. ``M @ v``, ``M + N``, ``M - N``, ``-M``, ``c * M`` and ``M / c`` work as usual.

    Subclasses must implement `_matmat`. All other methods have dense defaults, which refuse to build a matrix of more
    than `DENSE_LIMIT` rows. ``damping`` always means ``M + damping * I``.

    Attributes:
        space: names, shapes, dtype and device of the parameters.
    """

    fields: tuple[str, ...] = ()  # constructor arguments that are attributes, for saving
    is_known_by_products = False  # whether only products are cheap
    __array_ufunc__ = None  # let the operator handle a NumPy number times itself

    def __init_subclass__(cls) -> None:
        if cls.fields:
            KINDS[cls.__name__] = cls

    def __init__(self, space: Space) -> None:
        self.space = space
        self._generator: torch.Generator | None = None

    @abstractmethod
    def _matmat(self, V: Tensor) -> Tensor:
        """M V for columns (P, c)."""

    def _one_call(self) -> AbstractContextManager[None]:
        """A context for many products between which no code of the user's runs."""
        return nullcontext()

    @property
    def shape(self) -> tuple[int, int]:
        """(P, P)."""
        return self.space.size, self.space.size

    def by_columns(self, function: Callable[[Tensor], Tensor], v: Given) -> Given:
        """Apply a function of columns, (P, c) to (P, c), to a vector in any form and return the same form.

        Raises:
            KeyError, ValueError: names, shape, dtype or device do not match the space.
            TypeError: neither a tensor nor a dict of tensors.
        """
        if isinstance(v, Mapping):
            flat = self.space.checked(self.space.flatten(v), (self.space.size,), "the flattened vector")
            return self.space.split(function(flat[:, None])[:, 0])
        if not isinstance(v, Tensor):
            raise TypeError(f"expected a flat tensor or a dict of tensors by parameter name, found {type(v).__name__}")
        flat = self.space.checked(v, (self.space.size, *v.shape[1:2]), "the vector, or the matrix of columns,")
        return function(flat) if flat.ndim == 2 else function(flat[:, None])[:, 0]

    def __matmul__(self, v: Given) -> Given:
        """M v; errors as for `by_columns`."""
        return self.by_columns(self._matmat, v)

    def to_dict(self, flat: Tensor) -> dict[str, Tensor]:
        """Split a flat vector (*batch, P) into tensors (*batch, *shape) by name."""
        return self.space.split(flat)

    def to_dense(self) -> Tensor:
        """The matrix as a tensor (P, P); ValueError if P exceeds `DENSE_LIMIT`."""
        require_dense_size(self.space)
        if self.is_known_by_products:
            warn_of_products(self.space)
        return self._matmat(torch.eye(self.space.size, dtype=self.space.dtype, device=self.space.device))

    def materialise(self) -> Dense:
        """The same matrix as `Dense`, which can be saved and solves without further products."""
        return Dense(self.space, self.to_dense())

    def compact(self) -> Operator:
        """The same matrix in its smallest form that solves without further products: `Dense`, or `SampleSpace`."""
        return self.materialise()

    def diagonal(self) -> Tensor:
        """The diagonal, (P,)."""
        return self.to_dense().diagonal()

    def trace(self) -> Tensor:
        """The trace, a scalar tensor."""
        return self.diagonal().sum()

    def frobenius_norm(self) -> Tensor:
        """The root of the sum of squares of all entries, a scalar tensor."""
        return self.to_dense().norm()

    def eigenvalues(self, k: int | None = None) -> Tensor:
        """All eigenvalues, ascending, (P,), or only the k largest, (k,).

        With more than 2000 rows, the k largest of a matrix known by its products (`MatrixFree`, sums, multiples) come
        from block Lanczos, usually by some tens of products; `lanczos_eigenvalues` has tolerances. The k smallest are
        ``-(-M).eigenvalues(k)``.

        Raises:
            TypeError: k is no whole number.
            ValueError: k is not between 1 and P; or, without k, P exceeds `DENSE_LIMIT`.
            RuntimeError: Lanczos does not converge.
        """
        if k is None:
            return self._eigenvalues()
        check_whole("k", k, 1, self.space.size)
        return self._largest_eigenvalues(k)

    def _decomposed(self) -> Operator:
        """The form that solves."""
        return self.compact()

    def _eigenvalues(self) -> Tensor:
        held = self._decomposed()
        if self.is_known_by_products and isinstance(held, Dense):
            warn_of_decomposition(self.space)
        return held._eigenvalues()

    def _largest_eigenvalues(self, k: int) -> Tensor:
        if self.is_known_by_products and self.space.size > MAX_DIRECT_SIZE:
            with self._one_call():
                return linalg.largest_eigenpairs(self.__matmul__, self.space.normal(k))[0]
        return self._eigenvalues()[-k:]

    def solve(self, v: Given, damping: float = 0.0) -> Given:
        """``(M + damping I)^-1 v``.

        Raises:
            ValueError: the damped matrix is singular or indefinite to working precision.
        """
        return self.by_columns(lambda V: self._solve(V, float(damping)), v)

    def _solve(self, V: Tensor, damping: float) -> Tensor:
        return self._decomposed()._solve(V, damping)

    def inverse(self, damping: float = 0.0) -> Operator:
        """``(M + damping I)^-1``, decomposed once; errors as for `solve`."""
        return self._decomposed().inverse(damping)

    def logdet(self, damping: float = 0.0) -> Tensor:
        """``log det(M + damping I)``, a scalar tensor.

        Raises:
            ValueError: as for `solve`; the message gives the smallest eigenvalue and a sufficient damping.
        """
        return self._decomposed().logdet(damping)

    def det(self, damping: float = 0.0) -> Tensor:
        """``det(M + damping I)``, the product of its eigenvalues; soon beyond all floats: prefer `logdet`."""
        return (self.eigenvalues() + float(damping)).prod()

    def sample(self, k: int | None = None, *, damping: float = 0.0, generator: torch.Generator | None = None) -> Tensor:
        """Draw from the normal distribution ``N(0, (M + damping I)^-1)``: (P,), or (k, P).

        Args:
            k: number of draws; None for a single draw without that dimension.
            damping: added to the matrix, for example the precision of a prior.
            generator: on any device; by default the operator's own, seeded with 0, so that every call gives new draws.

        Raises:
            TypeError: k is no number of draws.
            ValueError: as for `solve`.
        """
        if k is not None and (isinstance(k, bool) or not isinstance(k, Integral) or k < 1):
            raise TypeError(f"k: expected a number of draws, found {k!r}; damping goes by name: sample(damping=...)")
        if generator is None:
            generator = self._generator = self._generator or self.space.generator()
        noise = self.space.normal(1 if k is None else k, generator)
        draws = self._inverse_root(noise, float(damping)).T
        return draws[0] if k is None else draws

    def _inverse_root(self, Z: Tensor, damping: float) -> Tensor:
        """R Z with ``R R^T = (M + damping I)^-1``, for columns (P, c)."""
        return self._decomposed()._inverse_root(Z, damping)

    def scaled(self, factor: float) -> Operator:
        """``factor * M``."""
        return Scaled(self, factor)

    def damped(self, damping: float) -> Operator:
        """``M + damping I`` as an operator."""
        return Scaled(self, 1.0, damping)

    def factored_damping(self, damping: float) -> Operator:
        """Damp Kronecker factors, which is cheaper (`Kronecker.factored_damping`); other matrices as by `damped`."""
        return self.damped(damping)

    def to_scipy(self) -> Any:
        """A ``scipy.sparse.linalg.LinearOperator`` with the same product, on NumPy arrays.

        Raises:
            ImportError: SciPy is not installed.
        """
        try:
            import scipy.sparse.linalg
        except ImportError as error:
            raise ImportError("to_scipy needs SciPy, which is not installed: pip install scipy") from error

        def product(array: Any) -> Any:
            columns = torch.from_numpy(array.reshape(self.space.size, -1).copy())
            if columns.is_complex():
                raise TypeError("the matrix is real: apply it to the real and imaginary parts separately")
            image = self._matmat(columns.to(self.space.device, self.space.dtype))
            return image.detach().cpu().numpy().reshape(array.shape)

        name = str(self.space.dtype).removeprefix("torch.")
        products = dict.fromkeys(("matvec", "rmatvec", "matmat", "rmatmat"), product)
        return scipy.sparse.linalg.LinearOperator(self.shape, dtype=name, **products)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        """`to_dense` as an array of its own, for NumPy; ValueError with ``copy=False``, since it has to be made."""
        if copy is False:
            raise ValueError("an operator has no array to share: leave out copy=False")
        array = self.to_dense().detach().cpu().numpy()
        return array.astype(array.dtype if dtype is None else dtype)

    def state(self) -> dict[str, Any]:
        """Tensors, numbers, strings and lists of them, for `save`.

        Raises:
            TypeError: the matrix is known only by its products; call `materialise` first.
        """
        name = type(self).__name__
        if not self.fields:
            raise TypeError(f"a {name} has only products, which cannot be saved: call .materialise() first")
        return {"structure": name, **{field: to_plain_data(getattr(self, field)) for field in self.fields}}

    def save(self, path: str | PathLike[str]) -> None:
        """Write the matrix to a file, for `load`; TypeError as for `state`."""
        torch.save(self.state(), path)

    def to(self, dtype: torch.dtype) -> Operator:
        """The same matrix, rounded to another precision.

        In float32 or float64 it is of the same kind, over a space of that precision. In bfloat16 it is kept in 16 bits
        and computes in the precision that it had: a method makes the matrix of a block, and forgets it afterwards.
        A `Kronecker` is kept in its eigenbasis then, where rounding leaves it positive definite; of a `Dense` it may
        not, without a damping of 1/256 of the largest eigenvalue.

        Raises:
            ValueError: another dtype.
            TypeError: as for `state`.
        """
        if dtype is torch.bfloat16:
            return self._in_16_bits()
        if dtype not in (torch.float32, torch.float64):
            raise ValueError(f"dtype: expected float64, float32 or bfloat16, found {dtype}")
        if dtype == self.space.dtype:
            return self
        return restore(rounded_state(self.state(), dtype, str(dtype).removeprefix("torch.")), None)

    def _in_16_bits(self) -> Operator:
        held = rounded_state(self.state(), torch.bfloat16)
        return restore({"structure": "Stored", "space": self.space.state(), "held": held}, None)

    @classmethod
    def from_state(cls, state: Mapping[str, Any], device: torch.device | str | None) -> Operator:
        """The matrix whose `state` this is, on a device; None for the one it was on."""
        return cls(**{key: restore(item, device) for key, item in state.items() if key != "structure"})

    def __mul__(self, factor: float) -> Operator:
        if not isinstance(factor, Tensor | int | float) and not hasattr(factor, "__float__"):
            return NotImplemented
        return self.scaled(float(factor))

    __rmul__ = __mul__

    def __truediv__(self, divisor: float) -> Operator:
        return self.scaled(1 / float(divisor))

    def __neg__(self) -> Operator:
        return self.scaled(-1.0)

    def __add__(self, other: Operator) -> Operator:
        return Sum([self, other]) if isinstance(other, Operator) else NotImplemented

    def __radd__(self, other: int) -> Operator:
        return self if isinstance(other, int) and other == 0 else NotImplemented  # with which `sum` begins

    def __sub__(self, other: Operator) -> Operator:
        return self + other.scaled(-1.0) if isinstance(other, Operator) else NotImplemented

    def _details(self) -> list[str]:
        return []

    def __repr__(self) -> str:
        names = self.space.names
        shown = ", ".join(names) if len(names) <= 4 else f"{names[0]}, ..., {names[-1]} ({len(names)} parameters)"
        dtype = str(self.space.dtype).removeprefix("torch.")
        size = f"{self.space.size} x {self.space.size}"
        return f"{type(self).__name__}({', '.join([size, *self._details(), dtype, str(self.space.device)])}; {shown})"


class Dense(Operator):
    """A matrix given by its entries.

    Args:
        space: of the parameters.
        matrix: (P, P), symmetric up to rounding; its symmetric part is used.

    Raises:
        ValueError: wrong shape, dtype or device, not symmetric, or not finite.
    """

    fields = ("space", "matrix")

    def __init__(self, space: Space, matrix: Tensor) -> None:
        super().__init__(space)
        self.matrix = linalg.symmetrize(space.kept(matrix, self.shape, "the matrix"), "the matrix")
        self._root: tuple[float, Tensor] | None = None  # the last damping and its Cholesky factor

    def _matmat(self, V: Tensor) -> Tensor:
        return linalg.matmul(self.matrix, V)

    def to_dense(self) -> Tensor:
        return self.matrix

    def materialise(self) -> Dense:
        return self

    def __add__(self, other: Operator) -> Operator:
        if isinstance(other, Dense) and other.space == self.space:
            return Dense(self.space, self.matrix + other.matrix)
        return super().__add__(other)

    def _eigenvalues(self) -> Tensor:
        return linalg.eigenvalues_of(self.matrix)

    def _cholesky(self, damping: float) -> Tensor:
        if self._root is None or self._root[0] != damping:
            self._root = damping, linalg.cholesky(self.matrix, damping, repr(self))
        return self._root[1]

    @linalg.full_precision()
    def _solve(self, V: Tensor, damping: float) -> Tensor:
        return torch.cholesky_solve(V, self._cholesky(damping))

    @linalg.full_precision()
    def _inverse_root(self, Z: Tensor, damping: float) -> Tensor:
        return torch.linalg.solve_triangular(self._cholesky(damping).mT, Z, upper=True)

    @linalg.full_precision()
    def inverse(self, damping: float = 0.0) -> Operator:
        return Dense(self.space, torch.cholesky_inverse(self._cholesky(float(damping))))

    def logdet(self, damping: float = 0.0) -> Tensor:
        return 2 * self._cholesky(float(damping)).diagonal().log().sum()


class Scaled(Operator):
    """``factor * M + shift * I``; as fast as M if factor > 0."""

    fields = ("inner", "factor", "shift")

    def __init__(self, inner: Operator, factor: float, shift: float = 0.0) -> None:
        super().__init__(inner.space)
        self.inner, self.factor, self.shift = inner, linalg.require_finite(factor), linalg.require_finite(shift)
        self.is_known_by_products = inner.is_known_by_products

    def _one_call(self) -> AbstractContextManager[None]:
        return self.inner._one_call()

    def _matmat(self, V: Tensor) -> Tensor:
        return torch.add(self.factor * self.inner._matmat(V), V, alpha=self.shift)

    def to_dense(self) -> Tensor:
        matrix = self.factor * self.inner.to_dense()
        matrix.diagonal().add_(self.shift)
        return matrix

    def diagonal(self) -> Tensor:
        return self.factor * self.inner.diagonal() + self.shift

    def trace(self) -> Tensor:
        return self.factor * self.inner.trace() + self.shift * self.space.size

    def frobenius_norm(self) -> Tensor:
        size, norm = self.space.size, self.factor * self.inner.frobenius_norm()
        if not self.shift:
            return norm.abs()
        return (norm.square() + self.shift * (2 * self.factor * self.inner.trace() + self.shift * size)).sqrt()

    def _eigenvalues(self) -> Tensor:
        return (self.factor * self.inner._eigenvalues() + self.shift).sort().values

    def _either(self, damping: float, inner: Callable[[float], T], dense: Callable[[Dense], T]) -> T:
        """Use M with the equivalent damping, else the dense matrix, so that errors are in the units of this one."""
        if self.factor > 0:
            try:
                return inner((self.shift + damping) / self.factor)
            except linalg.NotDefinite as error:
                log.info("%r: the dense matrix decides: %s", self, error)
        return dense(self.materialise())

    def _solve(self, V: Tensor, damping: float) -> Tensor:
        by_inner = lambda within: self.inner._solve(V, within) / self.factor
        return self._either(damping, by_inner, lambda dense: dense._solve(V, damping))

    def _inverse_root(self, Z: Tensor, damping: float) -> Tensor:
        by_inner = lambda within: self.inner._inverse_root(Z, within) / math.sqrt(self.factor)
        return self._either(damping, by_inner, lambda dense: dense._inverse_root(Z, damping))

    def inverse(self, damping: float = 0.0) -> Operator:
        by_inner = lambda within: self.inner.inverse(within).scaled(1 / self.factor)
        return self._either(float(damping), by_inner, lambda dense: dense.inverse(damping))

    def logdet(self, damping: float = 0.0) -> Tensor:
        by_inner = lambda within: self.inner.logdet(within) + self.space.size * math.log(self.factor)
        return self._either(float(damping), by_inner, lambda dense: dense.logdet(damping))

    def scaled(self, factor: float) -> Operator:
        return Scaled(self.inner, self.factor * linalg.require_finite(factor), self.shift * factor)

    def damped(self, damping: float) -> Operator:
        return Scaled(self.inner, self.factor, self.shift + damping)

    def _details(self) -> list[str]:
        return [f"{self.factor:.4g} * {type(self.inner).__name__} + {self.shift:.4g} * I"]


class Sum(Operator):
    """The sum of matrices over the same space; its solves are dense, its largest eigenvalues from products.

    Raises:
        ValueError: the spaces differ.
    """

    fields = ("terms",)
    is_known_by_products = True

    def __init__(self, terms: Sequence[Operator]) -> None:
        super().__init__(terms[0].space)
        nested = (term.terms if isinstance(term, Sum) else [term] for term in terms)
        self.terms: list[Operator] = [term for inner in nested for term in inner]
        for term in self.terms:
            if term.space != self.space:
                raise ValueError(f"a sum needs matrices over the same space, found {self.space} and {term.space}")

    def _matmat(self, V: Tensor) -> Tensor:
        return reduce(torch.add, (term._matmat(V) for term in self.terms))

    def to_dense(self) -> Tensor:
        return reduce(torch.add, (term.to_dense() for term in self.terms))

    def diagonal(self) -> Tensor:
        return reduce(torch.add, (term.diagonal() for term in self.terms))

    def trace(self) -> Tensor:
        return reduce(torch.add, (term.trace() for term in self.terms))

    def scaled(self, factor: float) -> Operator:
        return Sum([term.scaled(factor) for term in self.terms])

    def damped(self, damping: float) -> Operator:
        return Sum([self.terms[0].damped(damping), *self.terms[1:]])

    def _details(self) -> list[str]:
        return [" + ".join(type(term).__name__ for term in self.terms)]
