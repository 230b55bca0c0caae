"""Where a profile works: a window of rows of a blocked matrix, with its coordinates, blocks and random words."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from fuzz.philox import Words, key_of, word, words
from fuzz.values import ELEMENTS, FLOATS, Element, Float, Integers

Scalar = TypeVar("Scalar", bound=np.generic)


@dataclass(frozen=True, kw_only=True)
class Matrix:
    """A matrix input of a case.

    text, name, seed: of the case and the tensor. rows, cols: its shape. block: rows and columns of a full block.
    float_: the numbers' own format. element: the payload's. scale: the case's scale word. static: the given scale.
    nans: whether payload codes may be NaN outside the profile ``nonfinite``.
    """

    text: str
    name: str
    seed: int
    rows: int
    cols: int
    block: tuple[int, int] = (1, 1)
    float_: Float = FLOATS["fp32"]
    element: Element = ELEMENTS["e4m3"]
    scale: str = "fp32"
    static: float = 1.0
    nans: bool = True

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of the grid of blocks."""
        return -(-self.rows // self.block[0]), -(-self.cols // self.block[1])

    def key(self, salt: str = "") -> bytes:
        """The key of the tensor's stream, or of a stream beside it."""
        return key_of(self.text, f"{self.name}.{salt}" if salt else self.name)

    def word(self, salt: str, index: int = 0) -> int:
        """A word of a stream beside the tensor: one decision for the whole of it."""
        return word(self.key(salt), index)


@dataclass(frozen=True)
class Site:
    """Rows ``start..stop`` of a matrix.

    Arrays of elements are ``[stop - start, cols]``, arrays of blocks ``[block rows touched, grid columns]``.
    """

    matrix: Matrix
    start: int
    stop: int

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of an array of elements."""
        return self.stop - self.start, self.matrix.cols

    @cached_property
    def row(self) -> Integers:
        """Row numbers ``[rows, 1]``."""
        return np.arange(self.start, self.stop, dtype=np.int64)[:, None]

    @cached_property
    def col(self) -> Integers:
        """Column numbers ``[1, cols]``."""
        return np.arange(self.matrix.cols, dtype=np.int64)[None, :]

    @cached_property
    def index(self) -> Integers:
        """The row-major number of every element."""
        return self.row * self.matrix.cols + self.col

    @cached_property
    def block_row(self) -> Integers:
        """Block row numbers, an array of blocks with one column."""
        height = self.matrix.block[0]
        return np.arange(self.start // height, (self.stop - 1) // height + 1, dtype=np.int64)[:, None]

    @cached_property
    def block_col(self) -> Integers:
        """Block column numbers, an array of blocks with one row."""
        return np.arange(self.matrix.grid[1], dtype=np.int64)[None, :]

    @cached_property
    def block_index(self) -> Integers:
        """The row-major number of every block."""
        return self.block_row * self.matrix.grid[1] + self.block_col

    @cached_property
    def block_size(self) -> Integers:
        """Elements of every block, fewer at ragged edges."""
        return self._block_height * self._block_width

    @cached_property
    def _block_height(self) -> Integers:
        return np.minimum(self.matrix.block[0], self.matrix.rows - self.block_row * self.matrix.block[0])

    @cached_property
    def _block_width(self) -> Integers:
        return np.minimum(self.matrix.block[1], self.matrix.cols - self.block_col * self.matrix.block[1])

    @cached_property
    def inside(self) -> Integers:
        """The row-major number of every element within its own block."""
        height, width = self.matrix.block
        return (self.row % height) * self._block_width[:, self.col[0] // width] + self.col % width

    def words(self, salt: str = "") -> Words:
        """A word for every element."""
        cols = self.matrix.cols
        count = (self.stop - self.start) * cols
        return words(self.matrix.key(salt), self.start * cols, count).reshape(self.shape)

    def block_words(self, salt: str) -> Words:
        """A word for every block."""
        key, shape = self.matrix.key(f"block.{salt}"), self.block_index.shape
        return words(key, int(self.block_index[0, 0]), self.block_index.size).reshape(shape)

    def spread(self, blocks: npt.NDArray[Scalar]) -> npt.NDArray[Scalar]:
        """An array of blocks as an array of elements."""
        height, width = self.matrix.block
        blocks = np.broadcast_to(blocks, self.block_index.shape)
        rows = self.row[:, 0] // height - self.start // height
        spread: npt.NDArray[Scalar] = blocks[rows][:, self.col[0] // width]
        return spread


def ladder(site: Site, lowest: int, count: int, salt: str = "ladder") -> Integers:
    """An exponent for every block out of ``lowest .. lowest + count``, an array of blocks.

    Blocks side by side, above each other or diagonal always differ, and all blocks do where the exponents suffice. The
    number of exponents in use is odd (a prime), so that a period of 2, 4, ... 128 blocks never returns to the same one.
    """
    prime = next(number for number in range(count, 1, -1) if all(number % small for small in range(2, number)))
    rows, cols = site.matrix.grid
    # In a full grid a row's step is neither 0 nor +-1, so that diagonals differ as well.
    step = cols if rows * cols <= prime else 7
    stride, offset = 1 + site.matrix.word(salt, 0) % (prime - 1), site.matrix.word(salt, 1) % prime
    return lowest + ((site.block_row * step + site.block_col) % prime * stride + offset) % prime
