"""Push-sum over Zenoh is exact despite lost, doubled, late and reordered messages, once all have arrived."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from engines.peer.parties import Places, certified, push_sum, together, values

import hyperpush as hp
from hyperpush.engines.faults import Faults
from hyperpush.engines.peer import Peer
from hyperpush.engines.transport.faulty import Faulty

CLIENTS, ROUNDS = 4, 150


@pytest.mark.faults
@pytest.mark.parametrize("loss", [0.3, 0.5])
def test_the_average_is_exact_and_no_mass_is_lost(loss, tmp_path):
    identities = certified(tmp_path, [f"p{number}" for number in range(CLIENTS)])
    places, truth = Places(CLIENTS, identities), values(CLIENTS).mean(0)
    faults = Faults(loss=loss, duplicate=0.2, delay=2)
    network = hp.networks.RandomDirected(CLIENTS, probability=(0.4, 0.8))

    def party(client):
        transport = places.open(client, mode="asynchronous", longest_wait=0.1)
        lossy = Faulty(transport, faults, 11, client)
        try:
            transport.ready()
            with jax.enable_x64(True):
                peer = Peer(client, network, lossy, jax.random.key(3), tolerant=True)
                w, mass = peer.run(push_sum(ROUNDS), (jnp.asarray(values(CLIENTS)[client]), jnp.ones(())), None)
            return np.asarray(w), float(mass), lossy.lost, peer.counts.rejections.total()
        finally:
            transport.close()

    found = together(CLIENTS, party)
    assert sum(lost for *_, lost, _ in found) > 50  # faults did occur
    assert sum(rejected for *_, rejected in found) == 0
    np.testing.assert_allclose(sum(mass for _, mass, *_ in found), CLIENTS, rtol=1e-12)
    np.testing.assert_allclose(sum(w for w, *_ in found), values(CLIENTS).sum(0), atol=1e-11)
    for w, mass, *_ in found:
        np.testing.assert_allclose(w / mass, truth, atol=1e-6)
