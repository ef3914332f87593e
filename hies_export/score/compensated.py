"""Score units by greedy removal: how much the prediction still changes after least squares has refitted the others.

A unit whose output the other units can reproduce is cheap to remove, even if the prediction depends strongly on it. The
importance of single units does not show this, nor does any score that ignores which units are already removed.

For a consumer y = W x + b with kept inputs K and removed inputs M, least squares (`compensate`) leaves the error

    delta_t = (W'_K x_t,K + b') - y_t = -W_M r_t,   r_t = (x_t,M - mu_M) - C_MK (C_KK + lambda I)^-1 (x_t,K - mu_K)

at token t. (A consumer without a bias has mu = 0 and uncentred moments C.) To first order, the error at token t changes
the prediction by d_t = <g_t, delta_t> = -<h_t,M, r_t>. Here g and h = W^T g are the gradients of the prediction with
respect to the consumer's output and input. The effect of keeping K is

    e(K) = E_x [ sum_t d_t^2 + (sum_t d_t)^2 ]

in the same unit for every consumer. The second term is the change of the sample's prediction. In it, errors of tokens
cancel on the calibration rows, but may not cancel on others; the first term, which has no such sum, counts them in any
case. Each term alone was worse on some model. For a language model only the first term counts, because a text is not a
single prediction. The few tokens with the largest effects have bounded gradients, see `bounded` in
calibrate/readings.py. Units are removed step by step, each time those that raise e least.
"""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..calibrate.moments import LayerMoments, MomentStore, Spread
from ..calibrate.readings import Batches, Gradients, LayerEffects, Read, effects_of, own_batches
from ..calibrate.walk import device_of_blocks
from ..data.batches import size_of
from ..kinds import KINDS
from ..model.internals import exact_products
from ..model.linear import features_of
from ..model.memory import give_back_memory
from ..model.tokens import count_tokens
from ..processes import mapped, world
from ..progress import SILENT, Progress
from ..tasks import task_of
from ..units.units import PrunableModule
from .criteria import COMPENSATED, Chain, Removal, Scores, merged

# lambda, relative to the mean of the diagonal of C over all inputs of the module. (`compensate` takes the mean over the
# kept inputs.) A fixed lambda lets every e(K) follow from one inverse by downdating.
RIDGE = 0.1
STILL_LEFT = 0.8  # removed columns are dropped when a smaller share is left, because dropping copies the others
TOKENS_AT_ONCE = {"cpu": 256}  # whose numbers for all neurons fit the cache of a core together


def score_compensated(
    model: PreTrainedModel,
    batches: Sequence[dict[str, Tensor]],
    modules: Sequence[PrunableModule],
    *,
    moments: MomentStore | None = None,
    unit: str = "group",
    known: MutableMapping[str, Chain] | None = None,
    progress: Progress = SILENT,
) -> Scores:
    """Score every unit by its rank in a greedy removal of all units of its kind.

    Args:
        model: A classifier, regressor or language model; its weights, mode and gradients are restored.
        batches: Keyword arguments of the model, whose predictions the removals should change least. Labels only say
            where tokens are predicted. Fewer than about 256 samples need `moments`.
        modules: The modules that may lose units, heads or neurons.
        moments: The moments of at least these modules, from rows with more tokens than `batches` have: with few tokens,
            some neurons wrongly look free to remove. By default those of `batches`.
        unit: What an attention layer loses at once: a "group", or a head of every group ("query").
        known: Module -> its chain, for modules that were ranked before; new chains are added as soon as they are found.
        progress: Shows the loops over the blocks.

    Returns:
        The chains of removals, and scores, (units,) float64 per module: ranks among the units of a kind, in [0, 1).

    Raises:
        DataError: There is no batch, or a language model's sample has no label token.
        NonFiniteError: A prediction, a gradient or a moment is NaN or infinite; the message names the batch or module.

    Examples:
        >>> score_compensated(model, batches, modules).criterion
        'compensated'
    """
    task, device = task_of(model), device_of_blocks(model)
    per_sample = not task.generative  # a text is not a single prediction
    samples, chains = sum(map(size_of, batches)), {} if known is None else known
    parts = [(number, part) for number, batch in enumerate(batches) for part in task.parts(batch)]
    numbers, batches = [number for number, _ in parts], [part for _, part in parts]

    gradients = Gradients(model, batches, modules, "effect", numbers=numbers)
    spreads: dict[str, LayerMoments | Spread] = {}  # of modules that are not ranked yet, none without `moments`
    new = [block for block, inside in gradients.blocks.items() if any(m.name not in chains for m in inside)]
    names = {module.name for block in new for module in gradients.blocks[block]}

    def rank(modules: Sequence[PrunableModule], read: Read) -> None:
        """Add the chains of the modules of a block, and free their spreads; `read` gives the readings of a batch."""
        if all(module.name in chains for module in modules):  # the walk goes through this block all the same
            for number in own_batches(batches):
                read(number)
            return
        effects = effects_of(model, batches, modules, read)
        give_back_memory()  # of the readings that the effects were put together from

        def chain_of(_: int, module: PrunableModule) -> Chain:
            """Return the chain of a module, whose effects are then freed."""
            layer, spread = effects.pop(module.name), spreads.get(module.name)
            spread = spread.spread() if isinstance(spread, LayerMoments) else spread
            return removal_chain(layer, module, samples, spread=spread, per_sample=per_sample, unit=unit, device=device)

        chains.update(zip((module.name for module in modules), mapped(modules, chain_of), strict=True))
        for module in modules:
            spreads.pop(module.name, None)

    def add_spreads(modules: Sequence[PrunableModule], sums: Mapping[str, LayerMoments]) -> None:
        for module in modules:
            spreads[module.name] = sums[module.name]  # which make their spread when it is needed, if they are kept
            if moments is None or not moments.keeps:
                found = sums[module.name].spread(last=True)
                spreads[module.name] = replace(found, moments=found.moments.to(model.device, _dtype_of_order(module)))

    def rank_blocks(modules: Sequence[PrunableModule], sums: Mapping[str, LayerMoments]) -> None:
        add_spreads(modules, sums)
        for block, inside in gradients.blocks.items():
            if inside and inside[0] in modules:
                gradients.collect_again(block, rank)

    if names and (
        moments is None or moments.keeps or _spreads_are_small(model, modules, batches, len(gradients.blocks))
    ):
        if moments is not None:
            moments.each(add_spreads, names, progress=progress)
        gradients.collect(rank, name="modules ranked", progress=progress)
    elif names and moments is not None:
        gradients.collect(keep=new, name="effects", progress=progress)
        moments.each(rank_blocks, names, name="modules ranked", progress=progress)
    return scores_of_chains(modules, [chains[module.name] for module in modules], per_sample=per_sample)


def _spreads_are_small(
    model: PreTrainedModel, modules: Sequence[PrunableModule], batches: Batches, blocks: int
) -> bool:
    """Return whether the spreads of all modules take less memory in a process than the gradients of all blocks.

    The smaller ones are kept until modules are ranked. With the gradients, each block is computed once more for that.
    """
    if not task_of(model).generative:  # tokens of images are not counted
        return False
    shapes = [features_of(model.get_submodule(module.consumer)) for module in modules]
    spreads = 0
    for module, (_, inputs) in zip(modules, shapes, strict=True):
        spreads += _dtype_of_order(module).itemsize * inputs**2
    tokens, hidden = sum(count_tokens(model, batch) for batch in batches), shapes[0][0]
    return spreads <= blocks * tokens * hidden * model.dtype.itemsize / world()


def _dtype_of_order(module: PrunableModule) -> torch.dtype:
    """Return the dtype of a module's order; for systems of one neuron each, float32 is enough and twice as fast."""
    return torch.float64 if module.unit_width * module.group_size > 1 else torch.float32


def scores_of_chains(modules: Sequence[PrunableModule], chains: Sequence[Chain], *, per_sample: bool) -> Scores:
    """Return the scores of one chain per module: the rank of a unit in the merged chains of its kind, in [0, 1).

    The last removal of every module ranks after all others, because every module keeps something.
    """
    scores = {module.name: torch.zeros(module.units, dtype=torch.float64) for module in modules}
    for kind in dict.fromkeys(module.kind for module in modules):
        of_kind = [chain for module, chain in zip(modules, chains, strict=True) if module.kind == kind]
        order = merged([chain[:-1] for chain in of_kind])
        order += sorted((chain[-1] for chain in of_kind), key=lambda removal: removal.effect)
        total, rank = sum(len(removal.units) for removal in order), 0
        for removal in order:
            ranks = torch.full((len(removal.units),), rank, dtype=torch.float64)
            if KINDS[kind].step:  # neurons of a step are in order; the heads of a bundle go together
                ranks += torch.arange(len(removal.units))
            scores[removal.module][list(removal.units)] = ranks / total
            rank += len(removal.units)
    return Scores(COMPENSATED, {"ridge": RIDGE, "per_sample": per_sample}, scores, chains=tuple(chains))


@exact_products()
def removal_chain(
    layer: LayerEffects,
    module: PrunableModule,
    samples: int,
    *,
    spread: Spread | None = None,
    per_sample: bool = True,
    unit: str = "group",
    device: str | torch.device = "cpu",
) -> Chain:
    """Return the order in which greedy removal takes the groups of one module, with the effect after each step.

    Each step removes 1 % of a layer's neurons, one group of heads, or, with the unit "query", one head of every group.
    `spread` has mu and C from more tokens than the effects have; None to take them from the effects. If `per_sample`,
    a sample has a single prediction, so that the effects of its tokens also add up. Tensors are copied to `device`.
    """
    size, total = module.group_size, module.groups
    # Each step is one turn, or one for every group: how many groups to remove, and among which.
    if unit == "query" and size > 1:
        module = replace(module, groups=module.units)  # each query head is then a group
        steps = [[(1, range(start, start + size)) for start in range(0, module.units, size)]] * size
    else:
        step = max(1, round(KINDS[module.kind].step * total))
        steps = [[(min(step, total - start), range(total))] for start in range(0, total, step)]
    state = _Greedy(layer, module, samples, spread, per_sample=per_sample, device=device)
    # Results, of each turn the groups and the effect, are read at the end, because a GPU would wait at each read.
    removed = [[state.remove(count, among) for count, among in turns] for turns in steps]
    effects = torch.stack([turns[-1][1] for turns in removed]).tolist()
    chain = []
    for turns, effect in zip(removed, effects, strict=True):
        groups = torch.cat([groups for groups, _ in turns]).tolist()
        units = tuple(g * module.group_size + i for g in groups for i in range(module.group_size))
        chain.append(Removal(module.name, units, effect))
    return tuple(chain)


class _Greedy:
    """The state of a greedy removal, on one device: effects so far, and what the remaining groups would add.

    Let G be the inverse of C_KK + lambda I. Removing kept columns S leaves the residual (G_SS)^-1 (G x_K)_S, and the
    gradients of the others become h_K + P^T h_S with P = -(G_SS)^-1 G_SK. The inverse without S is
    G_KK - G_KS (G_SS)^-1 G_SK (optimal brain surgeon, Hassibi and Stork 1992). So judging a candidate takes only a
    system as large as one group.
    """

    def __init__(
        self,
        layer: LayerEffects,
        module: PrunableModule,
        samples: int,
        spread: Spread | None,
        *,
        per_sample: bool,
        device: str | torch.device,
    ):
        self._width = module.unit_width * module.group_size
        self._samples, self._per_sample = samples, per_sample
        self._sample = layer.sample.to(device)
        dtype, spread = _dtype_of_order(module), spread or Spread.of(layer.inputs, centred=layer.centred)
        mean = spread.mean.to(device)
        damped = spread.moments.to(device, dtype, copy=True)
        # If all inputs are zero, any damping above zero will do.
        damped.diagonal().add_(RIDGE * (damped.diagonal().double().mean().item() or 1.0))
        self._inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        inputs = layer.inputs.to(device, dtype)
        self._inputs = (inputs - mean.to(dtype) if layer.centred else inputs) @ self._inverse  # G x, (tokens, columns)
        self._gradient = layer.gradients.to(device, dtype, copy=True)  # h, likewise; both change in place
        self._of_token = self._inputs.new_zeros(len(inputs))  # change of the prediction at each token, d_t
        # The groups of the columns, and which of them are left. Removed columns are dropped now and then.
        self._groups = torch.arange(module.groups, device=device)
        self._left = torch.ones(module.groups, dtype=torch.bool, device=device)
        self._left_count = module.groups
        self._candidates = self._neurons() if self._width == 1 else self._heads()

    def remove(self, count: int, among: range) -> tuple[Tensor, Tensor]:
        """Remove the `count` groups of a range that raise the effect least; return them, (count,), and the new effect.

        Those that raise it least come first, among equals the later group. Both tensors stay on the device.
        """
        left = self._left & (self._groups >= among.start) & (self._groups < among.stop)
        candidates = torch.where(left, self._candidates, torch.inf)
        places = len(candidates) - 1 - candidates.flip(0).argsort(stable=True)[:count]
        groups, columns = self._groups[places], self._columns(places)
        # (G_SS)^-1, without the checks of `inv`, for which a GPU would wait. G is positive definite by its damping.
        solved = torch.linalg.inv_ex(self._inverse[columns][:, columns].double()).inverse.to(self._inverse)
        taken_over = solved @ self._inverse[columns]  # -P
        self._inverse.addmm_(self._inverse[:, columns], taken_over, alpha=-1)
        self._left[places] = False
        self._left_count -= count
        inputs, gradient = self._inputs[:, columns], self._gradient[:, columns]
        self._of_token += (gradient * (inputs @ solved)).sum(1)
        if self._width == 1:
            self._candidates = self._neurons(inputs, gradient, taken_over)
        else:
            self._take_over(slice(None), inputs, gradient, taken_over)
            self._candidates = self._heads()
        if self._left_count < STILL_LEFT * len(self._left):
            stay = self._columns(self._left.nonzero().flatten())
            self._inverse = self._inverse[stay][:, stay]
            self._inputs, self._gradient = self._inputs.index_select(1, stay), self._gradient.index_select(1, stay)
            self._groups, self._candidates = self._groups[self._left], self._candidates[self._left]
            self._left = self._left[self._left]
        return groups, self._effects(self._of_token[:, None])[0]

    def _take_over(self, tokens: slice, inputs: Tensor, gradient: Tensor, taken_over: Tensor) -> None:
        """Let the other columns take over from removed ones, (all tokens, removed) each, at some tokens, in place."""
        self._inputs[tokens].addmm_(inputs[tokens], taken_over, alpha=-1)
        self._gradient[tokens].addmm_(gradient[tokens], taken_over, alpha=-1)

    def _columns(self, places: Tensor) -> Tensor:
        """Return the columns of the groups at some places of `_groups`, (places * width,)."""
        return (places[:, None] * self._width + torch.arange(self._width, device=places.device)).flatten()

    def _neurons(self, *taken: Tensor) -> Tensor:
        """Return what `_heads` returns, for neurons; with arguments, first `_take_over` by them at all tokens.

        One pass over the tokens does both, so that their numbers are still in the processor's cache.
        """
        # With p = h r, D the diagonal of the inverse and d the effects so far: sum_t (p_t / D + d_t)^2, term by term.
        width = self._inputs.shape[1]
        squares, cross = self._inverse.new_zeros(width), self._inverse.new_zeros(width)
        of_sample = self._inputs.new_zeros(self._samples, width) if self._per_sample else None
        at_once = TOKENS_AT_ONCE.get(self._inputs.device.type, 1 << 16)
        for start in range(0, len(self._inputs), at_once):
            tokens = slice(start, start + at_once)
            if taken:
                self._take_over(tokens, *taken)
            products = self._gradient[tokens] * self._inputs[tokens]  # p
            if of_sample is not None:
                of_sample.index_add_(0, self._sample[tokens], products)
            cross += products.T @ self._of_token[tokens]
            squares += products.square_().sum(0)
        diagonal = self._inverse.diagonal().where(self._left, 1.0)
        effects = squares / diagonal**2 + 2 * cross / diagonal + self._of_token.double().square().sum()
        if of_sample is not None:
            before = self._of_token.new_zeros(self._samples).index_add_(0, self._sample, self._of_token)
            effects += (of_sample / diagonal + before[:, None]).square().sum(0)
        return effects / self._samples

    def _heads(self) -> Tensor:
        """Return the effect after the removal of each group alone, (groups,) float64; meaningless for removed ones."""
        of_token = self._of_token.new_zeros(len(self._of_token), len(self._groups))
        for place in self._left.nonzero().flatten().tolist():
            block = slice(place * self._width, (place + 1) * self._width)
            residual = torch.linalg.solve(self._inverse[block, block], self._inputs[:, block], left=False)
            of_token[:, place] = self._of_token + (self._gradient[:, block] * residual).sum(1)
        return self._effects(of_token)

    def _effects(self, of_token: Tensor) -> Tensor:
        """Return the effect e, (candidates,), from the change of the prediction at each token, (tokens, candidates)."""
        effects = of_token.square().sum(0).double()
        if self._per_sample:
            of_sample = of_token.new_zeros(self._samples, of_token.shape[1])
            effects += of_sample.index_add_(0, self._sample, of_token).square().sum(0).double()
        return effects / self._samples
