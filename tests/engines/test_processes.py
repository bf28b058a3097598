"""Peers in separate processes, each with only its own data, over a transport made of queues."""

import multiprocessing
import queue

import jax
import numpy as np

import hyperpush as hp
from hyperpush.engines.peer import Peer
from hyperpush.inner.base import InnerState
from hyperpush.tasks.logistic import logistic

CLIENTS = 3


class Queues:
    """One peer's end of the transport: every peer has a queue to which all others write."""

    def __init__(self, client, queues):
        self.client, self.queues, self.kept = client, queues, []

    def send(self, to, step, payload):
        self.queues[to].put((self.client, step, payload))

    def collect(self, step, expected):
        missing = set(expected) - {sender for sender, sent, _ in self.kept if sent == step}
        while missing:
            self.kept.append(self.queues[self.client].get(timeout=60))
            missing -= {sender for sender, sent, _ in self.kept if sent == step}
        due = [(sender, payload) for sender, sent, payload in self.kept if sent <= step]
        self.kept = [message for message in self.kept if message[1] > step]
        return due

    def close(self):
        pass


def setting():
    made = logistic(CLIENTS, 0, examples=10)
    program = hp.SGP(8, 0.5, batch_size=4).program(made.problem)
    return program, InnerState(made.params, made.hypers), made.data


def party(client, queues, results):
    program, states, data = setting()
    own = jax.tree.map(lambda leaf: leaf[client], (states, data))  # this process uses no other data
    peer = Peer(client, hp.networks.RandomDirected(CLIENTS), Queues(client, queues), jax.random.key(3))
    results.put((client, np.asarray(peer.run(program, *own).params)))


def test_processes_agree_with_the_simulator():
    context = multiprocessing.get_context("spawn")
    queues, results = [context.Queue() for _ in range(CLIENTS)], context.Queue()
    parties = [context.Process(target=party, args=(c, queues, results), daemon=True) for c in range(CLIENTS)]
    try:
        for process in parties:
            process.start()
        found = dict(results.get(timeout=120) for _ in parties)
    except queue.Empty:
        raise AssertionError([process.exitcode for process in parties]) from None
    finally:
        for process in parties:
            process.join(10)
            process.kill()
    program, states, data = setting()
    truth = hp.Simulate().run(program, hp.networks.RandomDirected(CLIENTS), states, data, jax.random.key(3))
    assert np.abs(truth.states.params).max() > 0.1
    np.testing.assert_allclose([found[c] for c in range(CLIENTS)], truth.states.params, rtol=1e-5, atol=1e-6)
