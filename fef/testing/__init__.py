"""For users and for fef's own tests: the router check, the imbalance workloads, recorded assignments."""

from fef.testing.check_router import check_router as check_router
