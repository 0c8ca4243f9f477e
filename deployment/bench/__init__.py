"""Measurements of servers and of starts: loads over HTTP, sweeps of settings, stages of a start."""

from .load import Traffic
from .measures import BenchReport, ClientReport
from .measuring import Plan, measure_server
from .prompts import RequestFields
from .server_facts import ServerAddress
from .server_process import ServerStart
from .startup import StartupPlan, measure_startup
from .sweeping import SweepPlan, sweep

__all__ = [
    "BenchReport",
    "ClientReport",
    "Plan",
    "RequestFields",
    "ServerAddress",
    "ServerStart",
    "StartupPlan",
    "SweepPlan",
    "Traffic",
    "measure_server",
    "measure_startup",
    "sweep",
]
