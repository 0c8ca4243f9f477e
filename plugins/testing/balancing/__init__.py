"""Tests of load balancers: scripted engines, and the conformance suite."""
