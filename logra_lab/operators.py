"""What a projection computes, as operators of torch: opaque to torch.compile and to fake tensors.

An operator takes no object, so the fields of a `Projection` go in and the object is found again.
By itself an operator drops tangents silently: those with a tensor to differentiate sit in an
autograd.Function, and the library calls that.
"""

from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd import forward_ad

from logra_lab import kernels

#: The projections in use, by their fields; they hold packed signs, which are slow to draw again.
ALIVE: WeakValueDictionary[tuple[Any, ...], Any] = WeakValueDictionary()


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """function.apply(*args), which torch.compile leaves alone while forward mode is on.

    It would trace the function's forward and forget its jvp (torch 2.13).
    """
    if torch.compiler.is_compiling() and forward_ad._current_level >= 0:
        return torch.compiler.disable(function.apply)(*args)
    return function.apply(*args)


def found(*fields: Any) -> Any:
    """The `Projection` of these fields: one in use, or a new one."""
    from logra_lab.projection import Projection  # it imports this module

    return ALIVE.get(fields) or Projection(*fields)


@torch.library.custom_op("logra_lab::project", mutates_args=())
def _project(
    x: Tensor,
    tokens: Tensor | None,
    back: bool,
    path: str,
    k: int,
    rank: int,
    seed: int,
    draw: int,
    kind: str,
) -> Tensor:
    projection = found(path, k, rank, seed, draw, kind)
    if back:
        return projection._back(x, tokens)
    if projection._by_kernel(x.dtype, x.device):
        from logra_lab.kernels import project as kernel  # needs Triton

        return kernel.launch(x, projection.key, rank, tokens)
    return projection._times(x, tokens)


@_project.register_fake
def _(
    x: Tensor, tokens: Tensor | None, back: bool, path: str, k: int, rank: int, *_: Any
) -> Tensor:
    return x.new_empty(*x.shape[:-1], k if back else rank)


class Project(torch.autograd.Function):
    """tokens · X Aᵀ, or tokens · X A on the way back, with derivatives of every order.

    The operator by itself would drop tangents silently.
    """

    @staticmethod
    def forward(  # spelt out: torch.compile counts the parameters
        x: Tensor,
        tokens: Tensor | None,
        back: bool,
        path: str,
        k: int,
        rank: int,
        seed: int,
        draw: int,
        kind: str,
    ) -> Tensor:
        return torch.ops.logra_lab.project(x, tokens, back, path, k, rank, seed, draw, kind)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, tokens, ctx.back, *ctx.fields = inputs
        kept = (
            None if tokens is None else x,
            tokens,
        )  # X only where a factor's derivative needs it
        ctx.save_for_backward(*kept)
        ctx.save_for_forward(*kept)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, tokens: Tensor | None, *rest: Any) -> Any:
        x = _in_front(x, in_dims[0], info.batch_size)
        if tokens is not None:
            tokens = _in_front(tokens, in_dims[1], info.batch_size)
        return Project.apply(x, tokens, *rest), 0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        (g,), (x, tokens), to_x, to_tokens = grads, ctx.saved_tensors, None, None
        if ctx.needs_input_grad[0]:
            to_x = Project.apply(g, tokens, not ctx.back, *ctx.fields)
        if ctx.needs_input_grad[1]:
            to_tokens = (g * Project.apply(x, None, ctx.back, *ctx.fields)).sum(-1)
            to_tokens = to_tokens.to(tokens.dtype)
        return to_x, to_tokens, *[None] * (1 + len(ctx.fields))

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        (x_dot, tokens_dot), (x, tokens) = tangents[:2], ctx.saved_tensors
        parts = []
        if x_dot is not None:
            parts.append(Project.apply(x_dot, tokens, ctx.back, *ctx.fields))
        if tokens_dot is not None:
            parts.append(Project.apply(x, tokens_dot.to(tokens.dtype), ctx.back, *ctx.fields))
        return sum(parts[1:], parts[0])


@torch.library.custom_op("logra_lab::signs", mutates_args=())
def _signs(
    dtype: torch.dtype,
    device: torch.device,
    path: str,
    k: int,
    rank: int,
    seed: int,
    draw: int,
    kind: str,
) -> Tensor:
    projection = found(path, k, rank, seed, draw, kind)
    if kind == "sign" and kernels.backend(device) == "triton":
        from logra_lab.kernels import signs as kernel  # needs Triton

        return kernel.launch(projection.key, slice(0, rank), slice(0, k), device).to(dtype)
    return next(projection.blocks(dtype, device, width=k))[1]


@_signs.register_fake
def _(dtype: torch.dtype, device: torch.device, path: str, k: int, rank: int, *_: Any) -> Tensor:
    return torch.empty(rank, k, dtype=dtype, device=device)


@torch.library.custom_op("logra_lab::gram", mutates_args=())
def _gram(
    dtype: torch.dtype,
    device: torch.device,
    path: str,
    k: int,
    rank: int,
    seed: int,
    draw: int,
    kind: str,
) -> Tensor:
    projection = found(path, k, rank, seed, draw, kind)
    if projection._by_kernel(dtype, device):
        from logra_lab.kernels import gram as kernel  # needs Triton

        return kernel.launch(projection.key, k, rank, dtype, device)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    gram = torch.zeros(rank, rank, dtype=wide, device=device)
    for _, block in projection.blocks(wide, device):
        gram.addmm_(block, block.T)
    return gram.mul_(1 / rank).to(dtype)


@_gram.register_fake
def _(dtype: torch.dtype, device: torch.device, path: str, k: int, rank: int, *_: Any) -> Tensor:
    return torch.empty(rank, rank, dtype=dtype, device=device)


@torch.library.custom_op("logra_lab::squared_norm", mutates_args=())
def _squared_norm(D: Tensor, gram: Tensor) -> Tensor:
    if D.dtype == torch.float32 and kernels.backend(D.device) == "triton":
        from logra_lab.kernels import gram as kernel  # needs Triton

        return kernel.launch_norm(D, gram)
    return torch.sum(gram * (D.T @ D), dtype=torch.float64)


@_squared_norm.register_fake
def _(D: Tensor, gram: Tensor) -> Tensor:
    return D.new_empty((), dtype=torch.float64)


class SquaredNorm(torch.autograd.Function):
    """⟨D gram, D⟩ for a symmetric gram, a constant; the derivative is 2 D gram."""

    @staticmethod
    def forward(D: Tensor, gram: Tensor) -> Tensor:
        return torch.ops.logra_lab.squared_norm(D, gram)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def vmap(info: Any, in_dims: Any, D: Tensor, gram: Tensor) -> Any:
        pairs = (
            _in_front(x, at, info.batch_size) for x, at in zip((D, gram), in_dims, strict=True)
        )
        return torch.stack([SquaredNorm.apply(*pair) for pair in zip(*pairs, strict=True)]), 0

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        D, gram = ctx.saved_tensors
        return (2 * grads[0] * (D @ gram).double()).to(D.dtype), None

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> Tensor:
        D, gram = ctx.saved_tensors
        return 2 * torch.sum((D @ gram) * tangents[0], dtype=torch.float64)


def _in_front(x: Tensor, at: int | None, size: int) -> Tensor:
    """x with the dimension that vmap maps over in front."""
    return x.expand(size, *x.shape) if at is None else x.movedim(at, 0)
