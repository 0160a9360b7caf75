"""The network as data: what links and devices can do, and what a layer costs on them."""
