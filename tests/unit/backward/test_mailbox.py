"""Values from a device are read when they have arrived, in order, and never waited for."""

import copy
import pickle

import pytest
import torch

from redivider.backward.mailbox import Mailbox
from redivider.backward.row import poisoned


class Arrival:
    """Stand-in for a CUDA event."""

    def __init__(self) -> None:
        self.arrived = False

    def query(self) -> bool:
        return self.arrived


def test_on_the_cpu_a_value_is_read_at_once():
    seen = []
    Mailbox().post(torch.tensor(3.0), lambda value: seen.append(value.item()))
    assert seen == [3.0]


def test_on_the_meta_device_there_is_nothing_to_read():
    def read(value):
        value.item()

    Mailbox().post(torch.empty((), device="meta"), read)


def test_values_in_flight_are_read_in_order_as_they_arrive():
    mailbox, arrivals = Mailbox(), [Arrival() for _ in range(3)]
    seen: list[float] = []
    for number, arrival in enumerate(arrivals):
        mailbox._in_flight.append((torch.tensor(number), arrival, lambda v: seen.append(v.item())))
    mailbox.poll()
    assert seen == []
    arrivals[0].arrived = arrivals[2].arrived = True
    mailbox.poll()
    assert seen == [0], "the second one has not arrived, so the third one waits"
    arrivals[1].arrived = True
    mailbox.poll()
    assert seen == [0, 1, 2]


def test_a_fault_is_raised_once_and_drops_what_was_posted_behind_it():
    def fail(_):
        raise OverflowError("no")

    mailbox, arrival = Mailbox(), Arrival()
    seen: list[torch.Tensor] = []
    arrival.arrived = True
    mailbox._in_flight += [
        (torch.tensor(0), arrival, fail),
        (torch.tensor(1), arrival, seen.append),
    ]
    with pytest.raises(OverflowError):
        mailbox.poll()
    mailbox.poll()
    assert seen == []


def test_copies_start_empty():
    mailbox = Mailbox()
    mailbox._in_flight.append((torch.tensor(0), Arrival(), print))
    assert copy.deepcopy(mailbox)._in_flight == pickle.loads(pickle.dumps(mailbox))._in_flight == []


def test_after_a_fault_gradients_are_not_numbers():
    x = torch.randn(3, requires_grad=True)
    poisoned(x, torch.tensor(False)).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.ones(3))
    y = poisoned(x, torch.tensor(True))
    assert torch.equal(y, x)
    y.sum().backward()
    assert x.grad.isnan().all()
