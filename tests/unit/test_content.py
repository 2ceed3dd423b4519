"""A hand-off is tied to the prompt whose KV it holds."""

import pytest
from toy_engine import POISON
from toy_pair import early_params, errors, failed, received, sent
from toy_world import World

from pynixlkv.connector import ConnectorScheduler, GroupSpec, KVTransferParams, RequestInfo
from pynixlkv.errors import ConfigError, ContentMismatch


@pytest.fixture(params=["pull", "push"])
def world(request):
    with World(request.param) as world:
        yield world


@pytest.fixture
def sides(world):
    return world.engine("P"), world.engine("D")


def test_mixed_up_hand_offs_are_refused_and_stay_for_the_right_readers(world, sides):
    prefill, decode = sides
    handed = {prompt: prefill.prefill(f"p{prompt}", prompt, 13) for prompt in (7, 8)}
    for prompt, other in ((7, 8), (8, 7)):
        with pytest.raises(ContentMismatch) as caught:
            decode.arrive("mixed", prompt, 13, handed[other])
        assert caught.value.expected == f"prompt {prompt} up to 13"
        assert caught.value.seen == f"prompt {other} up to 13"
        assert caught.value.expected in str(caught.value)
        assert caught.value.seen in str(caught.value)
        info = decode.requests["mixed"].info
        with pytest.raises(ContentMismatch):
            decode.scheduler.get_num_new_matched_tokens(info, 0)
        decode.finish("mixed")
    assert not decode.scheduler.build_connector_meta()
    for prompt, params in handed.items():
        decode.arrive(f"d{prompt}", prompt, 13, params)
        assert decode.schedule(f"d{prompt}") == 13
    world.until(lambda: world.outcomes["D"].received == {"d7", "d8"})
    assert decode.holds("d7")
    assert decode.holds("d8")
    world.until(lambda: world.outcomes["P"].sent == {"p7", "p8"})


def test_a_prompt_that_begins_as_the_hand_off_does_is_fetched_up_to_there(world, sides):
    prefill, decode = sides
    decode.arrive("longer", 7, 15, prefill.prefill("p1", 7, 13))
    assert decode.schedule("longer") == 13
    with pytest.raises(ContentMismatch, match="expected at most 9 tokens"):
        decode.arrive("shorter", 7, 9, prefill.prefill("p2", 7, 13))


def test_a_hand_off_of_whole_blocks_names_their_content():
    with World(partial_blocks=False) as world:
        params = world.engine("P").prefill("p1", 7, 13)
        assert params["content"] == "prompt 7 up to 12"
        decode = world.engine("D")
        decode.arrive("d1", 7, 13, params)
        assert decode.schedule("d1") == 12


def test_an_abort_of_a_queued_request_releases_its_own_hand_off(world, sides):
    prefill, decode = sides
    decode.arrive("d1", 7, 13, prefill.prefill("p1", 7, 13))
    decode.finish("d1")
    world.until(lambda: world.outcomes["P"].sent == {"p1"})


@pytest.mark.parametrize("computed", [(), (13,), (4, 13)])
def test_a_push_of_another_prompt_is_not_written_and_ends_no_lease(computed):
    """The consumers do not wait for the hand-off: only the producer can compare."""
    with World("push") as world:
        prefill, decode = world.engine("P"), world.engine("D")

        def ask():
            for name, prompt in (("mixed", 8), ("d1", 7)):
                decode.arrive(name, prompt, 13, early_params(prefill, "p1"))
                decode.schedule(name)
                if not computed:
                    world.until(failed(world, "mixed"))

        if computed:
            ask()
            world.until(lambda: prefill.stats.pushes == 2)
            prefill.begin("p1", 7, 13)
            for until in computed:
                prefill.compute("p1", until)
                world.round()
            prefill.hand_over("p1")
        else:
            prefill.prefill("p1", 7, 13)
            world.quiet()
            ask()
        world.until(failed(world, "mixed"))
        (error,) = errors(world, "mixed")
        assert "its content is prompt 7 up to 13; expected prompt 8 up to 13" in str(error)
        world.until(received(world))
        assert decode.holds("d1")
        blocks = decode.requests["mixed"].blocks
        assert (decode.ranks[0].read(blocks, range(13)) == POISON).all()
        world.until(sent(world))
        assert prefill.stats.leases == {"released": 1}


def test_samples_with_another_prompt_get_a_hand_off_of_their_own(world, sides):
    prefill, _ = sides
    offers = [prefill.prefill(f"{i}_p", 7 + i // 2, 13, sibling_group="p") for i in range(4)]
    assert [offer["remote_request_id"] for offer in offers] == ["0_p", "0_p", "2_p", "2_p"]
    assert offers[2]["content"] == "prompt 8 up to 13"


def scheduler():
    return ConnectorScheduler("P", [GroupSpec(4)], address=("h", 1))


def hand_off(content):
    info = RequestInfo("p1", 8, KVTransferParams(do_remote_decode=True), content)
    return KVTransferParams.from_dict(scheduler().request_finished(info, ((1, 2),), 8)[1])


def test_a_hand_off_without_content_is_refused_where_content_is_known():
    info = RequestInfo("d1", 8, hand_off(None), "mine {}".format)
    with pytest.raises(ContentMismatch, match="is not named; expected mine 8"):
        scheduler().on_new_request(info)


def test_nothing_is_compared_where_no_content_is_known():
    info = RequestInfo("d1", 8, hand_off("theirs {}".format))
    assert scheduler().get_num_new_matched_tokens(info, 0) == (8, True)


def test_content_is_bounded():
    params = hand_off("theirs {}".format).to_dict()
    with pytest.raises(ConfigError, match="content"):
        KVTransferParams.from_dict({**params, "content": "x" * 513})
