"""Attacks on an engine's two sockets, the side channel's listener and the control socket, by strangers over real TCP.

`python -m tests.attack` (`make attack`) starts a prefill and a decode engine (`tests/rig`), lets the decode engine pull
prompts all the time, and attacks the prefill engine meanwhile, one attack after the other; it prints what was tried,
memory before and after, and what a pull took. `tests/integration/test_attacks.py` runs short forms of the same.

* `zmtp`: what a ZMQ connection begins with and what a message looks like, by hand: strangers need not use libzmq.
* `attackers`: the attacks, each in a process of its own with the lowest priority, so that what is measured is what the
  engines do about it, and not who gets the cores.
* `scene`: the engines, the pulls, and the figures.
"""
