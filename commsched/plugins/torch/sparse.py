"""Sparse gradients: they travel densely, and beside them which rows were touched."""

from __future__ import annotations

import torch


class Rows:
    """For each row of a gradient whether any rank has touched it, which is more than that it is not zero: optimizers for
    sparse gradients leave the others alone.

    ``touched`` is the rows' place in a flat buffer: one float per row, the share of ranks when it is averaged.
    """

    def __init__(self, touched: torch.Tensor) -> None:
        self._touched = touched

    @torch.no_grad()
    def write(self, gradient: torch.Tensor | None, view: torch.Tensor) -> None:
        """Put the sparse ``gradient`` (None: no row) into the dense ``view`` and the rows."""
        view.zero_()
        self._touched.zero_()
        if gradient is not None:
            gradient = gradient.coalesce()
            rows = gradient.indices()[0]
            view.index_copy_(0, rows, gradient.values())
            self._touched.index_fill_(0, rows, 1.0)

    @torch.no_grad()
    def read(self, view: torch.Tensor) -> torch.Tensor:
        """The average as a coalesced sparse tensor of the rows that any rank has touched."""
        rows = self._touched.nonzero().squeeze(1)
        return torch.sparse_coo_tensor(rows.unsqueeze(0), view[rows], view.shape, is_coalesced=True, check_invariants=False)


def sparse_weights(model: torch.nn.Module) -> set[int]:
    """The ids of the parameters whose modules make sparse gradients."""
    return {
        id(module.weight)
        for module in model.modules()
        if isinstance(module, torch.nn.Embedding | torch.nn.EmbeddingBag) and module.sparse
    }
