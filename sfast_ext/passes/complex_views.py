"""Complex views of pairs of numbers, as rotary embeddings take them, which need the pairs next to each other."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import fx

from .fusion import fusion
from .rewrite import aten, call, is_op, overloads

if TYPE_CHECKING:
    from .context import PassContext

VIEW = overloads("view_as_complex")
CONTIGUOUS = overloads("contiguous")


@fusion(VIEW)
def complex_views(view: fx.Node, pinned: set[fx.Node], ctx: PassContext) -> bool:
    """Makes sure of the layout of what a complex view reads: the passes before may have changed it.

    Pattern: view_as_complex(x)
    Replacement: view_as_complex(contiguous(x)), which copies nothing if x is contiguous
    """
    x = view.args[0]
    if not isinstance(x, fx.Node) or is_op(x, CONTIGUOUS):
        return False
    with view.graph.inserting_before(view):
        view.args = (call(view.graph, aten.contiguous.default, (x,), x),)
    return True
