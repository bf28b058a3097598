"""What each method declares: where it runs, what it estimates and what it sends."""

from hyperpush.bilevel.bsa import BSA
from hyperpush.bilevel.dsbo_jhip import DSBOJHIP
from hyperpush.bilevel.fedbio import FedBiO, FedBiOAcc
from hyperpush.bilevel.fednest import FedNest
from hyperpush.bilevel.gbdsbo import GBDSBO
from hyperpush.bilevel.interact import INTERACT
from hyperpush.bilevel.ldp_dsbo import LDPDSBO
from hyperpush.bilevel.ma_dsbo import MADSBO
from hyperpush.bilevel.mdbo import MDBO
from hyperpush.bilevel.spdb import SPDB
from hyperpush.bilevel.svr_interact import SVRINTERACT
from hyperpush.bilevel.ttsa import TTSA
from hyperpush.bilevel.vrdbo import VRDBO
from hyperpush.estimators.alone import DirectGradient, LocalGradient
from hyperpush.estimators.client import ClientGradient
from hyperpush.estimators.dense import Dense
from hyperpush.estimators.directed_rb import DirectedRB
from hyperpush.estimators.exact_rb import ExactRB
from hyperpush.estimators.hgp import HGP
from hyperpush.estimators.implicit_cg import ImplicitCG
from hyperpush.estimators.implicit_neumann import ImplicitNeumann
from hyperpush.estimators.itd_backward import ITDBackward
from hyperpush.estimators.itd_forward import ITDForward
from hyperpush.estimators.state import Declaration
from hyperpush.estimators.tracked import TrackedHGP
from hyperpush.estimators.vr_hgp import VRHGP
from hyperpush.graph.big_fed import DECLARED

ESTIMATORS: dict[str, Declaration] = {
    method.__name__: method.declares
    for method in (
        HGP,
        TrackedHGP,
        DirectedRB,
        VRHGP,
        ExactRB,
        ITDBackward,
        ITDForward,
        ImplicitCG,
        ImplicitNeumann,
        Dense,
        ClientGradient,
        LocalGradient,
        DirectGradient,
    )
}

ALGORITHMS: dict[str, Declaration] = {
    method.__name__: method.declares
    for method in (
        INTERACT,
        SVRINTERACT,
        SPDB,
        MDBO,
        VRDBO,
        BSA,
        TTSA,
        FedNest,
        FedBiO,
        FedBiOAcc,
        DSBOJHIP,
        GBDSBO,
        MADSBO,
        LDPDSBO,
    )
}

# Their outer cost is one of the graph that clients sit on, not a mean of costs of their own.
ON_GRAPHS: dict[str, Declaration] = {f"BiGFed, {form}": declared for form, declared in DECLARED.items()}
