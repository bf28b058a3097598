"""Baselines for personal models, one file each: inner solvers that may also set hypers."""

from hyperpush.personalize.baselines.clustered import ClusteredFL as ClusteredFL
from hyperpush.personalize.baselines.fedavg_plus import FedAvgPlus as FedAvgPlus
from hyperpush.personalize.baselines.fedem import FedEM as FedEM
from hyperpush.personalize.baselines.fedprox import FedProx as FedProx
from hyperpush.personalize.baselines.pfedme import PFedMe as PFedMe
