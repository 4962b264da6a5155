"""The page of published and measured tables, and the records that it is made of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.published import PAGE, RECORDS, Record, page, records
from raypfl.studies import STUDIES
from raypfl.studies.description import load


def record(entries: list[dict[str, Any]], **changes: Any) -> Record:
    labels = {"down": "", "across": "", "metric": "GM"}
    values: dict[str, Any] = {"title": "A title", "reasons": [], "study": "s", "published": "A paper", "command": "c"}
    values |= {"deviations": [], "smaller": [], "runs": [], "entries": [labels | entry for entry in entries]}
    return Record(RECORDS / "a.json", values | changes)


def test_the_page_is_what_the_records_say():
    assert PAGE.read_text() == page(records()), "write it again: python -m benchmarks.published"


@pytest.mark.parametrize("file", sorted(RECORDS.glob("*.json")), ids=lambda file: file.stem)
def test_a_records_published_numbers_are_those_of_its_study(file: Path):
    values = json.loads(file.read_text())
    assert values["study"] in STUDIES and values["title"]
    study, _ = load(values["study"])
    for entry in values["entries"]:
        number = study.quoted(entry["method"], entry["down"], entry["across"], entry["metric"])
        recorded = (entry["published"], entry["published_spread"]) if "published" in entry else None
        assert recorded == (tuple(number) if number else None)


def test_a_record_with_numbers_far_off_says_what_is_known_of_the_reason():
    assert all(record.values["reasons"] for record in records() if record.far_off)


def test_a_cell_is_reproduced_if_means_are_near_or_intervals_over_seeds_overlap():
    entries = [
        {"method": "near", "values": [53.0], "published": 50.0},
        {"method": "overlaps", "values": [54.0, 58.0], "published": 50.0, "published_spread": 4.0},
        {"method": "apart", "values": [54.0, 58.0], "published": 50.0, "published_spread": 3.0},
        {"method": "over clients", "values": [56.0], "over_clients": [9.0], "published": 50.0, "published_spread": 9.0},
        {"method": "not published", "values": [1.0]},
    ]
    assert [cell.method for cell in record(entries).far_off] == ["apart", "over clients"]
    text = page([record(entries)])
    assert "| A title | 1 or 2 | 4 | 2 of 4 |" in text and "| apart | 56.0 ± 2.8 (50.0 ± 3.0) |" in text
    assert "Not: apart GM (+6.0), over clients GM (+6.0)." in text

    # The levels of smaller runs are not judged, but the order of their methods is shown.
    small = record(entries, smaller=["rounds"])
    assert not small.far_off and "| A title | 1 or 2 | 4 | smaller runs |" in page([small])

    answer = page([record(entries), small]).partition("Here is")[0].replace("\n", " ")
    assert "4 cells in 1 of the tables below were measured, 2 of them with one seed; 2 are reproduced." in answer
    assert "The other 1 table with published numbers" in answer


def test_how_methods_stand_is_shown_by_rank_with_the_cpu_time_of_a_seed():
    standing = {"low": 60.0, "high": 70.0, "to_best": -5.25, "to_best_low": -7.0, "to_best_high": -3.0}
    second = standing | {"chance_better": 0.01, "rank": 2, "rank_low": 2, "rank_high": 3}
    first = standing | {"to_best": 0.0, "chance_better": 0.5, "rank": 1, "rank_low": 1, "rank_high": 1}
    entries = [
        {"method": "FedAvg", "values": [64.0, 65.0, 66.0], "published": 85.0, "standing": second},
        {"method": "Ditto", "values": [70.0, 71.0], "published": 97.0, "standing": first},
        {"method": "FedPer", "values": [20.0, 30.0], "published": 90.0},
    ]
    costs = [("FedAvg", 10.0), ("FedAvg", 20.0), ("Ditto", 30.0), ("Ditto", None)]
    labels = {"down": "", "across": "", "rounds": 1}
    runs = [labels | {"method": method, "cpu_seconds": seconds} for method, seconds in costs]
    text = page([record(entries, runs=runs)])
    assert "| Ditto | 1 | 60.0 to 70.0 | – | – | – |\n" in text, "two seeds give a rank no interval"
    assert "| FedAvg | 2 (2 to 3) | 60.0 to 70.0 | -5.2 (-7.0 to -3.0) | 1 % | 15 |\n" in text
    assert text.index("| Ditto | 1 |") < text.index("| FedAvg | 2 (")
    reason = "In the global model of FedPer, what clients keep has its initial values. It is not ranked.\n"
    assert "| FedPer | " in text and reason in text


def test_what_was_left_out_of_a_table_is_one_line():
    lines = ["Only 2 of 3 methods; left out: FedNH.", "Only 1 of 2 blocks; left out: A; B.", "rounds is 1, not 2."]
    text = page([record([{"method": "a", "values": [1.0], "published": 1.0}], deviations=lines)])
    assert "Deviations:\n\n- Only 2 of 3 methods, 1 of 2 blocks.\n- rounds is 1, not 2.\n" in text


def test_of_columns_that_differ_in_the_round_alone_the_fair_one_is_ranked():
    standing = {"rank": 1, "rank_low": 1, "rank_high": 1, "low": 60.0, "high": 70.0}
    columns = ("best round", "last round", "chosen by validation", "loss")
    entries = [{"method": "a", "metric": column, "values": [1.0, 2.0], "standing": standing} for column in columns]
    entries[0]["published"] = 1.0
    ranked = [column for column in columns if f"| {column} | rank |" in page([record(entries)])]
    assert ranked == ["chosen by validation", "loss"]
    assert "| best round | rank |" in page([record(entries[:2])])


def test_rank_correlations_are_over_the_methods_of_a_column_that_has_four_or_more():
    measured = [10.0, 30.0, 20.0, 40.0]
    entries = [{"method": f"m{i}", "values": [value], "published": i} for i, value in enumerate(measured)]
    # One of six pairs is the other way round: tau = (5 - 1) / 6, rho = 1 - 6 * 2 / (4 * 15).
    assert record(entries).correlations() == {("", "", "GM"): (pytest.approx(0.8), pytest.approx(2 / 3))}
    assert record(entries[:3]).correlations() == {}


def test_a_searched_study_shows_what_it_chose_and_the_order_beside_fixed_settings():
    column = {"across": "Dir", "metric": "chosen"}
    fixed_values = {"a": [50.0, 52.0, 90.0], "b": [60.0, 60.0], "c": [70.0, 70.0], "d": [80.0, 80.0], "e": [1.0, 1.0]}
    fixed = record(
        [column | {"method": method, "values": values, "published": 1.0} for method, values in fixed_values.items()],
        title="Fixed",
    )
    searched_values = {"a": [90.0, 91.0], "b": [61.0, 61.0], "c": [71.0, 71.0], "d": [81.0, 81.0], "new": [1.0, 2.0]}
    lam = {"method.lam": {"loguniform": [0.1, 10]}}
    trials = []
    for method in searched_values:
        for number, score in enumerate((60.0, 70.0, None), start=1):
            values = {"training.lr": 0.1 * number} | ({"method.lam": 2.0} if method == "b" else {})
            labels = {"method": method, "down": "", "across": "Dir", "trial": number}
            trials.append(
                labels | {"values": values, "score": score, "chosen": number == 2, "cpu_seconds": 10.0 * number}
            )
    search = {"trials": 3, "seeds": 1, "shared": {"training.lr": {"uniform": [0.1, 1]}}, "methods": {"b": lam}}
    searched = record(
        [column | {"method": method, "values": values} for method, values in searched_values.items()],
        title="Searched",
        published=None,
        search=search,
        trials=trials,
    )

    text = page([fixed, searched])
    assert "| Searched | 2 | – | not published | – | – |" in text
    assert "Every method had 3 trials (15 in all, 0.1 CPU hours), each trained with 1 seed" in text
    chosen = "`training.lr` 0.2, `method.lam` 2 | `method.lam` 0.1 to 10, logarithmic | 70.0 | 60.0 to 60.0 | 60"
    assert f"| b · Dir | {chosen} |" in text
    # Of a's three fixed seeds, only the first two count: 51, the lowest. The search makes it the highest.
    assert "| a | 51.0 | 4 | 90.5 | 1 | +39.5 |\n| d | 80.0 | 1 | 81.0 | 2 | +1.0 |" in text
    longer = record(fixed.values["entries"], title="Fixed", runs=[{"rounds": 5, "cpu_seconds": 1.0} | column])
    assert "Fixed settings are" not in page([longer, searched])

    # Three of six pairs are the other way round.
    assert (
        "Fixed settings are those of Fixed; both use the 2 seeds that the two tables share. Rank correlation of the two"
        in text
    )
    assert "ρ -0.20, τ 0.00." in text and "| new |" not in text.partition("fixed | rank")[2]


def test_two_measurements_of_one_published_table_are_compared_by_the_order_of_their_methods():
    small_means = {"a": [50.0], "b": [60.0], "c": [70.0], "d": [80.0], "only here": [1.0]}
    large_means = {"a": [75.0, 95.0], "b": [95.0], "c": [96.0], "d": [97.0]}
    column = {"down": "Few classes", "across": "Dir"}
    small = record([column | {"method": m, "values": v, "published": 1.0} for m, v in small_means.items()])
    large = record([column | {"method": m, "values": v, "published": 1.0} for m, v in large_means.items()])
    small.values["title"] = "Paper, Table 1, a tenth"
    large.values["title"] = "Paper, Table 1, all samples, 50 rounds"

    other_block = record([{"method": m, "values": v, "published": 1.0} for m, v in large_means.items()])
    other_paper = record([column | {"method": m, "values": v, "published": 1.0} for m, v in large_means.items()])
    other_paper.values["published"] = "Another paper"

    text = page([small, large, other_block, other_paper])
    assert text.count("| GM | a tenth | rank | all samples, 50 rounds | rank | difference |") == 1
    assert text.count("Rank correlation of the two columns") == 1
    assert "| d | 80.0 | 1 | 97.0 | 1 | +17.0 |" in text and "| a | 50.0 | 4 | 75.0 | 4 | +25.0 |" in text
    assert "The first column is that of Paper, Table 1, a tenth; both use the 1 seed that the two tables share." in text
    assert "ρ 1.00, τ 1.00." in text
