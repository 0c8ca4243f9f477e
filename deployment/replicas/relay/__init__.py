"""Several frontends, in processes of their own, with the same engines.

The engines, their balancer, ledger and restarts are those of one process, which relays the requests
of the others: so each engine has one client, whose counts are exact.
"""
