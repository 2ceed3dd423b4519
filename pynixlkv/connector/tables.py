"""Block tables as engines hand them over, and as plans take them.

An engine has one block table for each of its groups of layers, and counts in its own blocks. The
groups of a geometry may be finer (layers of other shapes that share a table), and their blocks
smaller (kernels that split a block into several).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pynixlkv.errors import PlanError
from pynixlkv.plan import physical_blocks

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from numpy.typing import ArrayLike

    from pynixlkv.connector.metadata import BlockLists
    from pynixlkv.geometry import Group

__all__ = ["by_group"]


def by_group(
    groups: Iterable[Group],
    block_table_index: Mapping[str, int],
    blocks: BlockLists,
    starts: tuple[int, ...],
    sizes: tuple[int, ...],
) -> tuple[dict[str, ArrayLike], dict[str, int]]:
    """Return the table and the start of each group, in the blocks of its geometry.

    Parameters
    ----------
    groups : iterable of Group
        Groups of the side that the tables belong to.
    block_table_index : mapping of str to int
        Which table each group uses.
    blocks : tuple of tuple of int
        The tables.
    starts : tuple of int
        Token position of the first block of each table.
    sizes : tuple of int
        Tokens that a block of each table stands for; empty if these are the geometry's blocks.

    Raises
    ------
    PlanError
        If a table is missing, or its blocks are not whole numbers of the geometry's.
    """
    tables: dict[str, ArrayLike] = {}
    begins: dict[str, int] = {}
    for group in groups:
        index = block_table_index[group.name]
        if not index < len(blocks) == len(starts):
            raise PlanError(
                f"group {group.name!r} uses block table {index}; there are {len(blocks)} tables "
                f"and {len(starts)} starts"
            )
        tables[group.name], begins[group.name] = blocks[index], starts[index]
        size = sizes[index] if sizes else 0
        if size and group.block_size and size != group.block_tokens:
            if size % group.block_tokens:
                raise PlanError(
                    f"group {group.name!r}: a block of its table stands for {size} tokens, which "
                    f"are no whole number of blocks of {group.block_tokens}"
                )
            tables[group.name] = physical_blocks(blocks[index], size // group.block_tokens)
    return tables, begins
