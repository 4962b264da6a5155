"""How several methods stand on one test: intervals of their scores, differences to the best, and ranks.

All come from the same draws of a bootstrap over seeds and clients, so that methods are paired: a draw takes the same
seeds and clients for each of them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from raypfl.results.numbers import ClientScores, client_scores
from raypfl.results.pairing.differences import data_hash, keeps_clients
from raypfl.results.ranking.joint_draws import joint_draws
from raypfl.results.run_groups import RunGroup
from raypfl.runs.result import RunResult

Interval = tuple[float, float]


@dataclass(frozen=True)
class Standing:
    """A method among others on one test, over the seeds that all of them have.

    Attributes
    ----------
    mean, interval : its score and the middle 95 % of its draws.
    difference, difference_interval : its score minus that of the method with the best mean; 0 for that one.
    chance : the share of draws in which it is better than the method with the best mean; a tie counts half.
    rank, rank_interval : its place by the mean, from 1, and the middle 95 % of its places in the draws.
    seeds : the number of seeds.
    """

    mean: float
    interval: Interval
    difference: float
    difference_interval: Interval
    chance: float
    rank: int
    rank_interval: tuple[int, int]
    seeds: int

    @property
    def is_best(self) -> bool:
        """Whether no method has a better mean."""
        return self.rank == 1


def standings_of_groups(groups: Sequence[RunGroup], protocol: str, best: bool = False) -> dict[str, Standing]:
    """Return how the groups of a comparison stand by the primary metric, with the models that clients use.

    Parameters
    ----------
    best : whether to take the round that validation data chose, instead of the last evaluated ones.
    """
    scores = {}
    for group in groups:
        if not group.was_tested(protocol, best):
            continue
        model = group.deployed(protocol)
        scores[group.label] = {
            result.experiment.seed: client_scores(result, protocol, model, best) for result in group.results
        }

    results = {group.label: group.results for group in groups if group.label in scores}
    return standings(scores, pairing(results), higher_is_better=groups[0].unit.metric.higher_is_better)


@dataclass(frozen=True)
class Pairing:
    """What can be compared: the methods that have the same data, in the seeds that all of them have.

    Attributes
    ----------
    same_clients : whether the clients are the same in every seed.
    """

    methods: list[str]
    seeds: list[int]
    same_clients: bool


def pairing(results: Mapping[str, Sequence[RunResult]]) -> Pairing:
    """Return what can be compared; a method on other data than most methods (with validation data, say) is left out."""
    hashes = {}
    for method, runs in results.items():
        hashes[method] = {result.experiment.seed: data_hash(result) for result in runs}
    seeds = sorted(set.intersection(*map(set, hashes.values()))) if hashes else []

    data = {method: tuple(by_seed[seed] for seed in seeds) for method, by_seed in hashes.items()}
    common = Counter(data.values()).most_common(1)
    methods = [method for method in data if data[method] == common[0][0]]
    return Pairing(methods, seeds, all(keeps_clients(results[method][0]) for method in methods))


def standings(
    scores: Mapping[str, Mapping[int, ClientScores]], paired: Pairing, *, higher_is_better: bool
) -> dict[str, Standing]:
    """Return the standing of each paired method that has scores; empty if there is nothing to compare.

    Parameters
    ----------
    scores : method -> seed -> its clients' scores.
    """
    seeds = paired.seeds
    labels = []
    for label in paired.methods:
        if all(scores[label][seed].values.size for seed in seeds):
            labels.append(label)
    if len(labels) < 2 or not seeds:
        return {}

    aligned = [_aligned([scores[label][seed] for label in labels]) for seed in seeds]
    if not all(len(seed_scores.clients) for seed_scores in aligned):
        return {}

    values = [seed_scores.values for seed_scores in aligned]
    weights = [seed_scores.weights for seed_scores in aligned]
    means_by_seed = [np.average(seed_scores.values, axis=0, weights=seed_scores.weights) for seed_scores in aligned]
    means = np.mean(means_by_seed, axis=0)
    # Seeds with the same clients may still leave out different ones, such as those that were never trained.
    leave_out_same = all(np.array_equal(aligned[0].clients, seed_scores.clients) for seed_scores in aligned)
    draws = joint_draws(values, weights, paired.same_clients and leave_out_same)
    sign = 1 if higher_is_better else -1
    goodness = _nan_last(sign * means)
    best = int(np.argmax(goodness))

    places = _places(goodness[None])[0]
    drawn_places = _places(_nan_last(sign * draws))
    ahead = sign * (draws - draws[:, [best]])
    # A draw in which both are equal counts half.
    chances = (ahead > 0).mean(0) + (ahead == 0).mean(0) / 2

    standing_of = {}
    for i, label in enumerate(labels):
        standing_of[label] = Standing(
            mean=float(means[i]),
            interval=_middle(draws[:, i]),
            difference=float(means[i] - means[best]),
            difference_interval=_middle(draws[:, i] - draws[:, best]),
            chance=float(chances[i]),
            rank=int(places[i]),
            rank_interval=tuple(np.quantile(drawn_places[:, i], [0.025, 0.975], method="nearest").tolist()),
            seeds=len(seeds),
        )
    return standing_of


def _aligned(runs: Sequence[ClientScores]) -> ClientScores:
    """Return the scores of clients that all methods have in one seed; values and weights are ``[clients, methods]``.

    One model on one test set counts for every client of the others.
    """
    by_client = [run for run in runs if not run.is_of_one_test]
    if not by_client:
        values_of_all = np.stack([run.values for run in runs], 1)
        return ClientScores(runs[0].clients, values_of_all, np.stack([run.weights for run in runs], 1))

    shared = by_client[0].clients
    for run in by_client[1:]:
        shared = np.intersect1d(shared, run.clients)

    values = []
    weights = []
    for run in runs:
        if run.is_of_one_test:
            values.append(np.full(len(shared), run.values[0]))
            weights.append(np.ones(len(shared)))
        else:
            order = np.argsort(run.clients)
            places = order[np.searchsorted(run.clients, shared, sorter=order)]
            values.append(run.values[places])
            weights.append(run.weights[places])
    return ClientScores(shared, np.stack(values, 1), np.stack(weights, 1))


def _nan_last(scores: np.ndarray) -> np.ndarray:
    """Return scores, of which higher ones are better, with the lowest in place of NaN: of an infinite loss, say."""
    return np.where(np.isnan(scores), -np.inf, scores)


def _places(scores: np.ndarray) -> np.ndarray:
    """Return each method's place in each row of ``scores[draws, methods]``: 1 for the highest, also if it is shared."""
    return 1 + (scores[:, None, :] > scores[:, :, None]).sum(2)


def _middle(draws: np.ndarray) -> Interval:
    low, high = np.quantile(draws, [0.025, 0.975]).tolist()
    return low, high
