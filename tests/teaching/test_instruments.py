"""Whatever a learner's code puts in the place of an instrument is named."""

import sys
from types import ModuleType

import pytest
import torch

from minitron.measure.ledger import Ledger
from teaching.graders.instruments import Instruments


def other(*args):
    """Something else."""


def replace_a_function(monkeypatch):
    monkeypatch.setattr(torch, "cat", other)


def replace_a_method(monkeypatch):
    monkeypatch.setattr(Ledger, "__enter__", other)


def hide_an_inherited_method(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "clone", other)


def change_the_code(monkeypatch):
    monkeypatch.setattr(Ledger.bytes_sent, "__code__", other.__code__)


def replace_the_module(monkeypatch):
    monkeypatch.setitem(sys.modules, Ledger.__module__, ModuleType(Ledger.__module__))


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (replace_a_function, "torch.cat"),
        (replace_a_method, "Ledger.__enter__"),
        (hide_an_inherited_method, "Tensor.clone"),
        (change_the_code, "Ledger.bytes_sent"),
        (replace_the_module, "sys.modules.minitron.measure.ledger"),
    ],
)
def test_what_is_replaced_is_named(change, name, monkeypatch):
    instruments = Instruments()
    assert instruments.replaced() is None
    change(monkeypatch)
    assert not instruments.is_as_seen()
    assert instruments.replaced() == name


def test_a_new_name_is_no_replacement(monkeypatch):
    instruments = Instruments()
    monkeypatch.setattr(torch, "a_new_name", other, raising=False)
    assert not instruments.is_as_seen()
    assert instruments.replaced() is None
    assert instruments.is_as_seen()
