"""Mutants of what keeps strangers out."""

from __future__ import annotations

from connector.ports.curve_keys import CurveKeys
from connector.ports.gate import Access, Gate
from connector.ports.zmq_bridge import ZmqSideChannel
from connector.waiting_threads import call_in_thread
from connector.wire import params, signatures
from connector.wire.signatures import ParamsKeys
from tests.simulation.mutants.mutant import ByTest, Edit, Mutant

SIGNATURES = "tests/unit/test_signatures.py"
STRANGERS = "tests/conformance/test_strangers.py"

MUTANTS = (
    Mutant(
        name="signatures are not compared",
        broken="parameters that carry any signature with a known key are believed",
        changes=(Edit(ParamsKeys.find_fault, "if not hmac.compare_digest(", "if False and ("),),
        place=ByTest(f"{SIGNATURES}::test_every_field_is_bound"),
    ),
    Mutant(
        name="unsigned parameters are believed",
        broken="parameters without a signature count as genuine",
        changes=(Edit(params.require_genuine, "if allows_unsigned:", "if True:"),),
        place=ByTest(f"{SIGNATURES}::test_parameters_without_a_signature_are_refused_unless_that_is_allowed"),
    ),
    Mutant(
        name="a mixed fleet believes forged parameters",
        broken="where unsigned parameters are allowed, wrong signatures are too",
        changes=(Edit(params.require_genuine, "is None:", "is None or allows_unsigned:"),),
        place=ByTest(f"{SIGNATURES}::test_a_wrong_signature_is_refused_even_where_none_is_needed"),
    ),
    Mutant(
        name="connected to where a router says",
        broken="one host is compared with the signature, and the one that the router has written is connected to",
        changes=(Edit(params.require_genuine, "replace(unsigned, signature=remote.signature)", "replace(remote)"),),
        place=ByTest(f"{SIGNATURES}::test_d_connects_to_the_host_that_was_signed"),
    ),
    Mutant(
        name="the direction is not signed",
        broken="what D gives out for P counts as what P gives out for D",
        changes=(Edit(signatures._digest, "_LENDS_BACK if lends_back else _LENDS", "_LENDS"),),
        place=ByTest(f"{SIGNATURES}::test_the_direction_is_bound"),
    ),
    Mutant(
        name="address ranges are not compared",
        broken="any address is in allowed_peers",
        changes=(Edit(Access.allows_address, "if not self.networks:", "if True:"),),
        place=ByTest(f"{STRANGERS}::test_who_connects_from_outside_of_the_ranges_is_not_heard"),
    ),
    Mutant(
        name="connected to anywhere",
        broken="allowed_peers is for those who connect, and not for where the engine connects to",
        changes=(Edit(ZmqSideChannel.numeric_address, "if not self.access.allows_address(address):", "if False:"),),
        place=ByTest(f"{STRANGERS}::test_nothing_connects_to_where_it_may_not"),
    ),
    Mutant(
        name="any key is let in",
        broken="whoever has a key is let in, accepted or not",
        changes=(Edit(Gate._find_fault, "if key in keys.accepted", "if key"),),
        place=ByTest(f"{STRANGERS}::test_why_two_may_not_speak_is_said_on_both_sides"),
    ),
    Mutant(
        name="accepted keys are read once",
        broken="a key that is taken away counts until the engine ends",
        changes=(Edit(Gate._find_fault, "await keys.look_again()", "pass"),),
        place=ByTest(f"{STRANGERS}::test_keys_are_rolled_without_a_restart_of_those_who_accept_them"),
    ),
    Mutant(
        name="a folder that hangs is waited for",
        broken="while the file system with the keys is away nobody is let in, and no handshake ends in time",
        changes=(Edit(CurveKeys.look_again, "max(0.0, LOOK_WAIT_SECONDS - since_look)", "float('inf')"),),
        place=ByTest(f"{STRANGERS}::test_a_folder_that_hangs_leaves_the_keys_of_before"),
    ),
    Mutant(
        name="names wait for names that hang",
        broken="forty requests with names that hang keep the names of all engines from being found",
        changes=(Edit(call_in_thread, "trio.CapacityLimiter(1)", "None"),),
        place=ByTest(
            "tests/conformance/test_host_names.py::test_names_that_hang_delay_no_other_name_and_no_other_thread"
        ),
    ),
    Mutant(
        name="any server will do",
        broken="a link goes to a listener with whatever key the other end names",
        changes=(Edit(ZmqSideChannel._link_key, "if key not in keys.accepted:", "if False:"),),
        place=ByTest(f"{STRANGERS}::test_a_link_needs_the_key_of_its_listener"),
    ),
    Mutant(
        name="engines without keys are asked",
        broken="an engine with keys asks those without, too, unasked",
        changes=(Edit(ZmqSideChannel.may_be_insecure, "or self.access.allows_insecure", "or True"),),
        place=ByTest(f"{STRANGERS}::test_no_engine_without_keys_is_asked_unless_that_is_allowed"),
    ),
    Mutant(
        name="let in by a mistake",
        broken="who cannot be judged, because something raises, is let in",
        changes=(Edit(Gate._judge, "return FAILED", "return ALLOWED"),),
        place=ByTest(f"{STRANGERS}::test_nobody_is_let_in_by_a_mistake"),
    ),
    Mutant(
        name="let in without a gate",
        broken="libzmq is not told that there must be a gate",
        changes=(Edit(Gate.guard, "zmq.ZAP_ENFORCE_DOMAIN, 1", "zmq.ZAP_ENFORCE_DOMAIN, 0"),),
        place=ByTest(f"{STRANGERS}::test_nobody_is_let_in_when_there_is_no_gate"),
    ),
)
