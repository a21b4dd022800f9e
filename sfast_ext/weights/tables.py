"""Tables of a model: tensors that its forward reads, and that are no attribute of a module.

They are in lists, dictionaries, closures or objects, such as the rotary tables of a transformer. The behaviour key has
the address of each, so a plan is only valid for the very tensor that it was captured with. A plan reads its memory, and
thus sees what is written to it. Of a table on another device than the model's, each run copies the values, as the
forward does.
"""

from __future__ import annotations

import torch

from sfast_ext.weights.weight import Weight, is_plain, new_weight

MAX_COPIED = 8 << 20
"""Bytes of a table that is copied to the model's device in each run."""
_SLOT = "table"


def table_of(tensor: torch.Tensor) -> Weight | None:
    """The weight of a table, None if it has no memory that can be read. It keeps the tensor, whose address is part of
    the key."""
    if not is_plain(tensor) or tensor.device.type == "meta":
        return None
    return new_weight(f"a table {list(tensor.shape)}", tensor, [({_SLOT: tensor}, _SLOT)])


def copied_table(table: Weight, device: torch.device) -> Weight | None:
    """The copy of a table on another device; None if it is too large."""
    source = table.bound
    assert source is not None
    if source.numel() * source.element_size() > MAX_COPIED:
        return None
    with torch.inference_mode(False), torch.no_grad():
        live = torch.empty_like(source, device=device)
    return Weight(table.path, live, pointer=live.data_ptr(), source=source)
