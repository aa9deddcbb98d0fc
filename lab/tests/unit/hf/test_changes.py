"""An accelerated model that changes while some of its layers draft, which are made anew with it."""

from __future__ import annotations

from unit.hf import test_changes
from unit.hf.test_changes import check_lent_engines, check_writes

plan = test_changes.plan  # a fixture


def test_tokens_after_a_write_of_any_kind_are_those_of_stock(plan: str) -> None:
    check_writes("early_exit:layers=1", plan)


def test_an_engine_that_was_lent_before_a_write_is_not_used_after_it(plan: str) -> None:
    check_lent_engines("early_exit:layers=1", plan)
