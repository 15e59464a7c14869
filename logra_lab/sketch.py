"""The sketch S = Hᵀ(X Aᵀ): what a layer keeps of its gradient.

`Sketch(model, rank)` freezes the model and puts a forward hook on every target linear. The hook
is the identity on the layer's output; it saves P = X Aᵀ [n, r], and its backward adds Hᵀ P to S.
The layer itself runs unchanged, and since its weight is frozen, autograd keeps no X for it and
never forms G = Hᵀ X. Accumulation happens in backward, so a forward that activation checkpointing
repeats still counts each token once.
"""

import warnings
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from jaxtyping import Float
from torch import Tensor, nn

from logra_lab import kernels, operators
from logra_lab.errors import InputError
from logra_lab.projection import Projection, canonical_path
from logra_lab.ranks import ALONE, Arriving, Ranks, local

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
# Siblings that read one activation share one A and one P (4 saved projections a block, not 7).
SHARED_INPUTS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


@dataclass
class Site:
    """One layer input: the projection its readers share, and P of the forward under way."""

    path: str
    k: int
    projection: Projection
    readers: list[str] = field(default_factory=list)
    _last: tuple["weakref.ref[Tensor]", int, Tensor] | None = None

    def project(self, x: Tensor, dtype: torch.dtype, reader: str) -> Tensor:
        """P = X Aᵀ, computed by the first reader of an activation and handed to the others."""
        if self._last is not None:
            ref, version, p = self._last
            if ref() is x and version == x._version and p.dtype == dtype:
                if reader == self.readers[-1]:
                    self._last = None  # the last reader: let the graph alone own P
                return p
        p = self.projection.project(x.detach().to(dtype))
        shared = len(self.readers) > 1 and reader != self.readers[-1]
        self._last = (weakref.ref(x), x._version, p) if shared else None
        return p


@dataclass(frozen=True)
class Layer:
    """A target: its module, its rows of the flat sketch, and the input it reads.

    Over ranks, S holds the rows `held` of the layer's d rows; `rows` are their places in `flat`.
    """

    path: str
    module: nn.Linear
    S: Float[Tensor, "held r"]
    rows: slice
    site: Site
    d: int
    held: slice

    @property
    def weight(self) -> Float[Tensor, "held k"]:
        """The rows of W that this process holds, to read or to write in place."""
        return local(self.module.weight)


class Inbox:
    """Rows of sketches that are on their way from other ranks: one layer's at a time."""

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self._last: tuple[Tensor, Arriving] | None = None

    def add(self, S: Float[Tensor, "held r"], whole: Float[Tensor, "d r"]) -> None:
        """S += this rank's rows of the sum of `whole` over ranks, by the next call at the latest.

        The ranks run through the layers in one order, since they run one model.
        """
        self.settle()
        self._last = S, self.ranks.scatter_sum(whole)

    def settle(self) -> None:
        if self._last is not None:
            (S, arriving), self._last = self._last, None
            S.add_(arriving.wait())


def accumulate(S: Float[Tensor, "d r"], H: Float[Tensor, "*n d"], P: Float[Tensor, "*n r"]) -> None:
    """S += Hᵀ P, in the type of S; by the Triton kernel on CUDA. Cost: 2·n·d·r FLOPs.

    Raises `InputError` for shapes that do not fit and for an expanded S.
    """
    if (*H.shape[:-1], *S.shape) != (*P.shape[:-1], H.shape[-1], P.shape[-1]):
        raise InputError(
            f"accumulate: expected S [d, r], H [*n, d] and P [*n, r], got {list(S.shape)}, "
            f"{list(H.shape)} and {list(P.shape)}"
        )
    if kernels.overlaps(S):
        raise InputError(f"accumulate: entries of S share memory (strides {S.stride()}); copy it")
    if S.dtype == torch.float32 and kernels.backend(S.device) == "triton":
        from logra_lab.kernels import accumulate as kernel  # needs Triton

        kernel.accumulate(S, H, P)
        return
    rows = H.reshape(-1, S.shape[0]).to(S.dtype)
    S.addmm_(rows.T, P.reshape(-1, S.shape[1]).to(S.dtype))


class _Accumulate(torch.autograd.Function):
    """Identity on the output; backward adds Hᵀ P to S.

    `anchor` is a scalar that requires grad: it keeps the node alive where nothing below the
    layer does (the first block of a frozen model), and never receives a gradient.
    """

    @staticmethod
    def forward(y: Tensor, P: Tensor, anchor: Tensor, S: Tensor, inbox: Inbox | None) -> Tensor:
        return y.detach()  # no copy, and unlike a view it may be modified in place downstream

    @staticmethod
    def setup_context(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
        _, P, _, ctx.S, ctx.inbox = inputs
        ctx.save_for_backward(P)

    @staticmethod
    def backward(ctx, H):  # type: ignore[no-untyped-def, override]
        (P,) = ctx.saved_tensors
        if ctx.inbox is None:
            accumulate(ctx.S, H, P)
        else:
            whole = ctx.S.new_zeros(H.shape[-1], ctx.S.shape[1])
            accumulate(whole, H, P)
            ctx.inbox.add(ctx.S, whole)
        return H, None, None, None, None

    @staticmethod
    def jvp(ctx, y_tangent, *_):  # type: ignore[no-untyped-def, override]
        return y_tangent


class Sketch:
    """Attach rank-r gradient sketches to the target linears of any module.

    Args:
        model: any module; every parameter is frozen until `remove()` restores the old flags.
        rank: r, at most the input features of every target.
        targets: last path components (``"q_proj"``) or full paths of `nn.Linear` modules.
        share_inputs: one A for q/k/v and one for gate/up (default), or one A per matrix.
        projection: ``"sign"`` or ``"gaussian"``. seed, draw: see `Projection`.
        ranks: who else holds rows of the targets; their weights are DTensors then. Backward sums
            Hᵀ P over the ranks and leaves each its own rows.

    Raises `InputError` for an unknown, tied, quantised or missing target and for a rank that does
    not fit. Memory: `flat`, Σd·r numbers (float32; float64 for a float64 model); P per forward.
    """

    def __init__(
        self,
        model: nn.Module,
        rank: int,
        *,
        seed: int = 0,
        draw: int = 0,
        targets: Sequence[str] = TARGETS,
        share_inputs: bool = True,
        projection: str = "sign",
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.rank, self.seed, self.kind = model, rank, seed, projection
        self.ranks, self.inbox = ranks, None if ranks is ALONE else Inbox(ranks)
        modules = find_targets(model, targets)
        first = next(iter(modules.values())).weight
        sites: dict[str, Site] = {}
        for path, module in modules.items():
            key = _site_key(path, module) if share_inputs else path
            if key not in sites:
                sites[key] = Site(path, module.in_features, self._projection(path, module, draw))
            sites[key].readers.append(path)
        held = {path: ranks.rows(module.out_features) for path, module in modules.items()}
        rows = sum(span.stop - span.start for span in held.values())
        dtype = torch.float64 if first.dtype == torch.float64 else torch.float32
        device = ranks.device or first.device
        #: All sketches, one below the other: a row of `flat` is a row of some S.
        self.flat: Float[Tensor, "rows r"] = torch.zeros(rows, rank, dtype=dtype, device=device)
        self.sites = list(sites.values())
        self.layers: dict[str, Layer] = {}
        start = 0
        for path, module in modules.items():
            here = held[path]
            span = slice(start, start := start + here.stop - here.start)
            site = sites[_site_key(path, module) if share_inputs else path]
            S, d = self.flat[span], module.out_features
            self.layers[path] = Layer(path, module, S, span, site, d, here)
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._active = True
        self._flags = {p: p.requires_grad for p in model.parameters()}
        model.requires_grad_(False)
        self._handles = [
            layer.module.register_forward_hook(self._hook(layer), with_kwargs=True)
            for layer in self.layers.values()
        ]

    def redraw(self, draw: int) -> None:
        """Use the projections of another draw; the sketch must be empty (call `zero_` first)."""
        for site in self.sites:
            module = self.layers[site.readers[0]].module
            site.projection = self._projection(site.path, module, draw)

    def zero_(self) -> None:
        """Forget the accumulated gradient."""
        self.settle()
        self.flat.zero_()
        for site in self.sites:
            site._last = None

    def settle(self) -> None:
        """Wait for what other ranks send; `flat` is whole then. Nothing to do on one process."""
        if self.inbox is not None:
            self.inbox.settle()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Forward passes inside leave no trace in the sketch."""
        before, self._active = self._active, False
        try:
            yield
        finally:
            self._active = before

    def remove(self) -> None:
        """Take the hooks off and give every parameter its old `requires_grad`."""
        for handle in self._handles:
            handle.remove()
        for parameter, flag in self._flags.items():
            parameter.requires_grad_(flag)

    def _projection(self, path: str, module: nn.Linear, draw: int) -> Projection:
        key = canonical_path(path)
        return Projection(key, module.in_features, self.rank, self.seed, draw, self.kind)

    def _hook(self, layer: Layer):  # type: ignore[no-untyped-def]
        def hook(module, args, kwargs, output):  # type: ignore[no-untyped-def]
            if not (self._active and torch.is_grad_enabled()):
                return None
            if module is not layer.module:
                return None  # a deep copy of the model carries this hook along
            x = args[0] if args else kwargs["input"]
            # output.dtype is what the layer really computed in, autocast included
            with torch.no_grad(), torch.autocast(output.device.type, enabled=False):
                P = layer.site.project(x, output.dtype, layer.path)
            return operators.apply(_Accumulate, output, P, self._anchor, layer.S, self.inbox)

        return hook


def find_targets(model: nn.Module, targets: Sequence[str]) -> dict[str, nn.Linear]:
    """The target linears by path, in module order; `InputError` names what cannot be used."""
    targets = (targets,) if isinstance(targets, str) else tuple(targets)
    named = dict(model.named_modules())
    linears = {n: m for n, m in named.items() if isinstance(m, nn.Linear)}
    short = sorted({n.rsplit(".", 1)[-1] for n in linears})
    found: dict[str, nn.Linear] = {}
    used: set[str] = set()
    for name, module in named.items():
        hits = {name, name.rsplit(".", 1)[-1]} & set(targets)
        if not hits or not (isinstance(module, nn.Linear) or hasattr(module, "weight")):
            continue
        used |= hits
        _check_usable(name, module)
        found[name] = module  # type: ignore[assignment]
    missing = [t for t in targets if t not in used]
    if not found or (missing and targets != TARGETS):
        raise InputError(
            f"targets {missing} name no linear layer of {type(model).__name__}; its linear layers "
            f"are {short or 'none'}: name some of these in targets="
        )
    others = sorted(set(short) - {n.rsplit(".", 1)[-1] for n in found} - {"lm_head"})
    if missing and others:
        warnings.warn(
            f"{type(model).__name__} has no {', '.join(missing)}: only {len(found)} of its linear "
            f"layers are trained, and {', '.join(others)} stay frozen; name them in targets= if "
            "they should not",
            stacklevel=4,
        )
    owners: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter.data_ptr() or id(parameter), []).append(name)
    for name, module in found.items():
        holders = owners[module.weight.data_ptr() or id(module.weight)]
        others = [holder for holder in holders if holder != f"{name}.weight"]
        if others:
            raise InputError(
                f"target {name!r} shares its weight with {others}: an "
                "update would change both; untie them or leave it out of targets"
            )
    return found


def _check_usable(name: str, module: nn.Module) -> None:
    weight = getattr(module, "weight", None)
    shape = (getattr(module, "out_features", -1), getattr(module, "in_features", -1))
    dense = isinstance(weight, Tensor) and weight.is_floating_point() and weight.element_size() > 1
    if not (isinstance(module, nn.Linear) and dense and tuple(module.weight.shape) == shape):
        kind = f"{type(module).__name__} with weight {getattr(weight, 'dtype', type(weight))}"
        raise InputError(
            f"target {name!r} is {kind}: expected nn.Linear with an unquantised floating-point "
            "weight [d, k]; load the model without quantisation or leave it out of targets"
        )


def _site_key(path: str, module: nn.Linear) -> str:
    parent, _, leaf = path.rpartition(".")
    for siblings in SHARED_INPUTS:
        if leaf in siblings:  # cross-attention may read two inputs of different width
            return f"{parent}.{siblings[0]}*{module.in_features}"
    return path
