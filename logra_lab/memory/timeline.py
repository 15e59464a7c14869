"""The bytes that training holds while it runs, operation by operation: dense against sketched."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float, Int64
from torch import Tensor, nn

from logra_lab.errors import InputError
from logra_lab.memory.live import LiveBytes
from logra_lab.rl.recompute import recomputed_layers
from logra_lab.sketch import TARGETS, Sketch, find_targets

GRADIENT, SKETCH = "weight gradients", "sketch S"
#: What backward needs of the forward, and what it makes on its way down.
FLOW = "activations and their gradients"


@dataclass(frozen=True)
class Timeline:
    """Bytes alive after each operation, by kind, over some microbatches; weights are left out.

    Attributes: `bytes[kind][i]` after operation i; `marks`, (operation, what ends there).
    """

    bytes: dict[str, list[int]]
    marks: list[tuple[int, str]]

    @property
    def total(self) -> list[int]:
        return [sum(now) for now in zip(*self.bytes.values(), strict=True)]

    @property
    def peak(self) -> int:
        return max(self.total)

    def most(self, kind: str) -> int:
        """The largest number of bytes of a kind; 0 if there was none."""
        return max(self.bytes.get(kind, [0]))

    def end(self, text: str) -> int:
        """The operation at which a mark of this text stands first."""
        return next(at for at, said in self.marks if said == text)


def timeline(
    model: nn.Module,
    batches: Sequence[Int64[Tensor, "b T"]],
    *,
    rank: int | None,
    checkpointing: str = "none",
) -> Timeline:
    """Forward and backward of every microbatch, watched; with dense gradients for rank None.

    The model is copied; only its target matrices are trained. A tensor is a weight gradient if it
    has the shape of a trained weight. Raises `InputError` where activations have such a shape too:
    with as many tokens in a microbatch as a weight has rows or columns.
    """
    model = copy.deepcopy(model)
    targets = find_targets(model, TARGETS)
    shapes = {tuple(m.weight.shape) for m in targets.values()}
    widths = {size for shape in shapes for size in shape}
    for ids in batches:
        if ids.numel() in widths:
            raise InputError(
                f"a microbatch of {ids.numel()} tokens: activations would have the shape of a "
                f"weight; choose another size than {sorted(widths)}"
            )
    sketch = None if rank is None else Sketch(model, rank)
    if sketch is None:
        model.requires_grad_(False)
        for module in targets.values():
            module.weight.requires_grad_(True)

    def kind(tensor: Tensor) -> str:
        shape = tuple(tensor.shape)
        return GRADIENT if shape in shapes or shape[::-1] in shapes else FLOW

    tokens = sum(ids.numel() for ids in batches)
    with LiveBytes(kind) as live:
        for number, ids in enumerate(batches, 1):
            loss = text_loss(model, ids, tokens, checkpointing)
            live.mark(f"forward {number}")
            loss.backward()
            del loss
            live.mark(f"backward {number}")
    held = {SKETCH: sketch.flat.nbytes} if sketch is not None else {}
    kinds = [name for name in (GRADIENT, FLOW) if any(now[name] for _, now in live.events)]
    series = {name: [size] * len(live.events) for name, size in held.items()}
    series |= {name: [now[name] for _, now in live.events] for name in kinds}
    return Timeline(series, live.marks)


def text_loss(
    model: nn.Module, ids: Int64[Tensor, "b T"], tokens: int, checkpointing: str = "none"
) -> Tensor:
    """This microbatch's share of the next-token loss over `tokens` tokens in all microbatches.

    Divided by a number that was fixed before the first one, so that the shares add up.
    """
    with recomputed_layers(model, checkpointing):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
    loss = nn.functional.cross_entropy(
        logits.flatten(0, 1).float(), ids[:, 1:].flatten(), reduction="sum"
    )
    return loss / tokens


def accumulated(
    model: nn.Module,
    batches: Sequence[Int64[Tensor, "b T"]],
    rank: int,
    checkpointing: str = "none",
) -> Float[Tensor, "rows r"]:
    """The sketch of a whole batch, summed over these microbatches of it; the model is copied."""
    sketch = Sketch(copy.deepcopy(model), rank)
    tokens = sum(ids.numel() for ids in batches)
    for ids in batches:
        text_loss(sketch.model, ids, tokens, checkpointing).backward()
    return sketch.flat
