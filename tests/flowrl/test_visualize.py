import importlib
import itertools
import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

import flowrl as fl
from flowrl.errors import BackendError, ConfigError, Location
from flowrl.graph import Binding, FunctionSpec, Graph, Node
from flowrl.loss import loss
from flowrl.visualize import render, to_string, to_text
from flowrl.visualize.fold import MAX_BOXES, fold
from flowrl.visualize.layout import spread
from flowrl.visualize.measure import cells, label_size
from flowrl.visualize.routes import draw
from flowrl.visualize.scene import scene_of

ROWS = [{"prompt": "1+1", "answer": "2"}] * 64
SVG = "{http://www.w3.org/2000/svg}"


@fl.reward(timeout=10, on_error="drop")
def exact_match(response, answer):
    return float(response == answer)


@fl.advantage(min_group=2)
def centre(scores, group):
    return scores


@fl.advantage(out=("advantages", "returns"))
def gae(scores, ref_logprobs, values):
    return scores, scores


@loss
def clip(logprobs, old_logprobs, advantages, *, low: float = 0.2):
    return logprobs


@loss
def squares(values, returns):
    return values


@fl.graph
def grpo(data=ROWS, staleness: int = 0, train: fl.Mesh = fl.Mesh(dp=2, tp=2), score: fl.Mesh = fl.Mesh.cpu(4)):
    """Group-relative policy optimisation."""
    policy = fl.Model("builtin:reverse_digits", mesh=train, optimizer=fl.AdamW(lr=1e-6))
    prompts = fl.prompts(data, batch=32)
    samples = fl.rollout(policy, prompts, n=8, max_new_tokens=512, staleness=staleness)
    scores = exact_match(samples, mesh=score)
    fl.update(policy, samples, centre(samples, scores), loss=clip(low=0.3))


@fl.graph
def ppo(train: fl.Mesh = fl.Mesh(dp=2), sample: fl.Mesh = fl.Mesh(dp=4), value: fl.Mesh = fl.Mesh(dp=2)):
    policy = fl.Model("builtin:reverse_digits", mesh=train, optimizer=fl.AdamW(lr=1e-6))
    critic = fl.Model("critic", mesh=value, optimizer=fl.AdamW(lr=1e-6), head="value", name="critic")
    samples = fl.rollout(policy, fl.prompts(ROWS, batch=32), n=4, staleness=2, mesh=sample)
    kept = fl.filter(samples, keep=lambda response_ids: True, reason="too short")
    scores = exact_match(kept)
    reference = fl.logprobs(policy.frozen(), kept)
    advantage = gae(kept, scores, reference, fl.values(critic, kept))
    fl.update(policy, kept, advantage, loss=clip())
    fl.update(critic, kept, advantage, loss=squares(), name="update_critic")
    fl.evaluate(policy, fl.prompts(ROWS, batch=16, name="held_out"), exact_match, every=10)


@fl.graph
def dapo(waves: int = 4):
    """Dynamic sampling."""
    policy = fl.Model("builtin:reverse_digits", optimizer=fl.AdamW(lr=1e-6))
    samples = fl.rollout(policy, fl.prompts(ROWS, batch=8), n=4)
    scores = exact_match(samples)
    useful = fl.filter(samples, scores, keep=lambda scores: scores.std() > 0, per="group", refill=waves)
    fl.update(policy, useful, centre(useful, scores), loss=clip())


def function_node(name, sources):
    spec = FunctionSpec(
        function=len, settings={}, timeout_s=None, on_error="fail", retries=0, max_failure_rate=0.0, role="node"
    )
    bindings = tuple(Binding("x", source, "x") for source in sources)
    return Node(name=name, spec=spec, per="row", bindings=bindings, gates=(), outputs=("x",), at=Location("g.py", 1))


def chain(length):
    return Graph.build("chain", [function_node(f"n{i}", [f"n{i - 1}"] if i else []) for i in range(length)])


def joined_layers(num_layers, width):
    before = [[f"l{layer - 1}_{i}" for i in range(width)] if layer else [] for layer in range(num_layers)]
    nodes = [function_node(f"l{layer}_{i}", before[layer]) for layer in range(num_layers) for i in range(width)]
    return Graph.build("layers", nodes)


def tangled(size):
    """Each node reads two or three earlier ones, in a fixed pattern without symmetry."""
    sources = [sorted({max(0, i - 1 - (i * k * 7) % 11) for k in (1, 2, 3)}) if i else [] for i in range(size)]
    return Graph.build("tangled", [function_node(f"n{i}", [f"n{j}" for j in sources[i]]) for i in range(size)])


def cyclic():
    edges = {"a": ["c"], "b": ["a", "d"], "c": ["b", "gone"], "d": ["c", "d"]}
    return Graph.build("cyclic", [function_node(name, sources) for name, sources in edges.items()])


@pytest.mark.parametrize("suffix", [".svg", ".html", ".mmd", ".dot", ".txt"])
def test_every_format_shows_nodes_settings_columns_rates_bounds_and_staleness(suffix, tmp_path):
    path = render(grpo(staleness=3), tmp_path / f"graph{suffix}", bounds={("rollout", "exact_match"): "1,024 rows"})
    picture = path.read_text(encoding="utf-8")
    for text in ("prompts", "rollout", "exact_match", "centre", "update", "batch=32", "max_new_tokens=512", "clip",
                 "response_ids", "32 prompts", "256 rows", "bound 1,024 rows", "version (staleness 3)", "dp=2 tp=2",
                 "4 CPU workers", "policy: trained"):  # fmt: skip
        assert text in picture


def test_a_rollout_on_its_own_mesh_shows_the_replica_and_the_way_of_the_weights():
    scene = scene_of(ppo())
    [sample] = [cluster for cluster in scene.clusters if cluster.title == "sample"]
    assert sample.models == ("policy: replica, hf float32",)
    [version] = [arrow for arrow in scene.arrows if arrow.kind == "version" and arrow.target == "rollout"]
    assert version.columns == ("version (staleness 2)", "weights: train → sample")


def test_rows_behind_a_filter_are_an_upper_bound():
    rates = {(arrow.source, arrow.target): arrow.rate for arrow in scene_of(ppo()).arrows}
    assert rates["rollout", "filter"] == "128 rows"
    assert rates["exact_match", "gae"] == "≤ 128 rows"


@pytest.mark.parametrize("suffix", [".svg", ".html", ".mmd", ".dot", ".txt"])
def test_every_format_shows_from_where_a_filter_refills(suffix):
    text = to_string(dapo(), suffix)
    for part in ("refill=4", "refill (at most 4 waves)", "8 prompts a wave", "32 rows a wave"):
        assert part in text, part


def test_a_refill_runs_back_from_the_filter_to_the_prompts():
    scene = scene_of(dapo())
    [arrow] = [arrow for arrow in scene.arrows if arrow.kind == "refill"]
    assert (arrow.source, arrow.target) == ("filter", "prompts")
    drawing = draw(fold(scene))
    assert arrow.runs_back
    [line] = [line for line in drawing.lines if line.arrow == arrow]
    assert line.points[0][1] > line.points[-1][1], "it leaves the filter below the prompts"
    rates = {(a.source, a.target): a.rate for a in scene.arrows}
    assert rates["prompts", "rollout"] == "8 prompts a wave"
    assert rates["rollout", "exact_match"] == "32 rows a wave"
    assert rates["filter", "update"] == rates["rollout", "update"] == "≤ 32 rows"


def test_two_meshes_of_one_shape_are_two_clusters():
    titles = [cluster.title for cluster in scene_of(ppo()).clusters]
    assert sorted(titles) == ["host", "sample", "train", "value"]


NASTY = 'x"><script>alert(1)</script>\\N `]]> & {{%%{init}%%}} \x07\n# ; --> end'


def nasty():
    """Names and sources as no tracer would let them pass, but `Graph.build` does."""
    data = [{"prompt": "a", "answer": "b"}] * 4
    good = grpo(data)
    nodes = [function_node(NASTY, []), function_node("reader", [NASTY]), *good.nodes.values()]
    return Graph.build(NASTY, nodes, doc=NASTY)


def test_svg_with_hostile_names_is_well_formed_and_holds_no_script():
    root = ElementTree.fromstring(to_string(nasty(), ".svg"))
    assert not [element for element in root.iter() if element.tag not in {
        SVG + tag for tag in ("svg", "style", "rect", "text", "g", "title", "path")
    }]  # fmt: skip
    assert any("<script>alert(1)</script>" in (element.text or "") for element in root.iter(f"{SVG}title"))


def test_html_with_hostile_names_has_only_its_own_scripts_and_loads_nothing():
    page = to_string(nasty(), ".html")
    assert page.count("<script") == page.count("</script") == 2
    assert "default-src 'none'" in page
    assert not re.search(r"""(src|href)\s*=\s*["']""", page)
    assert "http://" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "https://" not in page
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    assert data["title"] == NASTY
    assert data["nodes"]["rollout"]["at"].endswith(tuple("0123456789"))
    assert ["sampling.n", "8"] in data["nodes"]["rollout"]["details"]


def test_mermaid_with_hostile_names_has_balanced_quotes_and_no_markup_of_theirs():
    lines = to_string(nasty(), ".mmd").splitlines()
    assert all(line.count('"') in (0, 2) for line in lines)
    labels = re.findall(r'"(.*)"', "\n".join(lines))
    tags = {tag for label in labels for tag in re.findall(r"<.*?>", label)}
    assert tags == {"<b>", "</b>", "<small>", "</small>", "<br/>"}
    assert not any(character in label for label in labels for character in "`{}%\\\n")


def test_dot_with_hostile_names_is_made_of_whole_quoted_strings():
    text = to_string(nasty(), ".dot")
    bare = re.sub(r'"(?:[^"\\]|\\.)*"', "", text)
    assert '"' not in bare
    assert set(bare) <= set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_ \n{}[]=;,->")
    assert "\\\\N" in text


GRAPHS = [grpo(), ppo(), dapo(), tangled(36), joined_layers(3, 4), cyclic(), chain(1)]


@pytest.mark.parametrize("graph", GRAPHS, ids=lambda graph: graph.name)
def test_boxes_and_labels_do_not_overlap_and_no_line_crosses_one(graph):
    scene = fold(scene_of(graph))
    drawing = draw(scene)
    sizes = {name: (at.x, at.y + at.height / 2, at.width, at.height) for name, at in drawing.boxes.items()}
    sizes |= {i: (*line.label, *label_size(line.arrow)) for i, line in enumerate(drawing.lines) if line.label}
    areas = {name: (x - w / 2, y - h / 2, x + w / 2, y + h / 2) for name, (x, y, w, h) in sizes.items()}
    for (_, a), (_, b) in itertools.combinations(areas.items(), 2):
        assert a[2] <= b[0] or b[2] <= a[0] or a[3] <= b[1] or b[3] <= a[1]
    for i, line in enumerate(drawing.lines):
        for (x1, y1), (x2, y2) in itertools.pairwise(line.points):
            assert x1 == x2 or y1 == y2
            for name, (left, top, right, bottom) in areas.items():
                if name != i:
                    apart = max(x1, x2) <= left or min(x1, x2) >= right or max(y1, y2) <= top or min(y1, y2) >= bottom
                    assert apart, (line.arrow, name)
    assert all(a[0] >= 0 and a[2] <= drawing.width and a[3] <= drawing.height for a in areas.values())


def test_a_small_graph_is_not_folded():
    scene = scene_of(ppo())
    assert fold(scene) is scene


@pytest.mark.parametrize(("graph", "most"), [(chain(500), 1), (joined_layers(5, 10), 5), (tangled(2000), MAX_BOXES)])
def test_a_large_graph_is_drawn_in_groups_and_every_node_is_in_one(graph, most):
    scene = fold(scene_of(graph))
    assert 1 <= len(scene.boxes) <= most
    assert sorted(name for box in scene.boxes for name in (box.members or (box.name,))) == sorted(graph.nodes)
    for suffix in (".svg", ".html", ".mmd", ".dot"):
        assert to_string(graph, suffix)
    assert f"{len(graph.nodes)} nodes" in to_text(graph) or most > 1


def test_a_folded_layer_says_what_it_holds():
    text = to_text(joined_layers(5, 10))
    assert "l0_0 … l0_9" in text
    assert text.count("10 nodes") == 5


def test_a_graph_with_a_cycle_and_a_missing_node_is_drawn():
    for suffix in (".svg", ".html", ".mmd", ".dot", ".txt"):
        assert "gone" in to_string(cyclic(), suffix)
    assert "never declared" in to_text(cyclic())


@pytest.mark.parametrize("graph", [grpo(), ppo(), tangled(30), chain(500), cyclic(), nasty()], ids=range(6))
@pytest.mark.parametrize("width", [80, 50])
def test_text_fits_the_terminal(graph, width):
    lines = to_text(graph, width, ascii_only=False).split("\n")
    assert max(map(cells, lines)) <= width


def test_text_draws_a_rail_from_each_node_to_its_readers():
    lines = to_text(grpo(), ascii_only=False).split("\n")
    [rollout] = [line for line in lines if " rollout " in line and "train" in line]
    assert rollout.startswith("├▶┬ rollout")
    assert rollout.endswith("◀╌╮")
    [update] = [line for line in lines if "update · train" in line]
    assert update.startswith("╰─┴───┴▶╴ update")
    assert update.endswith("╌╯")


def test_text_is_ascii_where_the_terminal_knows_no_more(monkeypatch):
    monkeypatch.setattr("sys.stdout", type("Narrow", (), {"encoding": "ascii"})())
    text = to_text(ppo())
    assert text.isascii()
    assert "|>+ rollout" in text or "-|>+ rollout" in text


def test_an_unknown_suffix_names_those_there_are(tmp_path):
    with pytest.raises(ConfigError, match=r"ends with no format that flowrl draws[\s\S]*\.jpg[\s\S]*\.svg \| \.html"):
        render(grpo(), tmp_path / "graph.jpg")


def test_a_png_without_its_library_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cairosvg", None)
    with pytest.raises(BackendError, match=r"needs the cairosvg package[\s\S]*pip install cairosvg, or -o graph\.svg"):
        render(grpo(), tmp_path / "graph.png")


def test_a_folder_that_is_not_there_is_an_error_that_names_the_picture(tmp_path):
    with pytest.raises(ConfigError, match=r"the picture '.*no/graph\.svg' cannot be written"):
        render(grpo(), tmp_path / "no" / "graph.svg")


def test_a_picture_names_no_folder_of_this_machine(tmp_path):
    source = tmp_path / "train.jsonl"
    source.write_text(json.dumps(ROWS[0]) + "\n")
    picture = to_string(grpo(str(source)), ".svg")
    assert "train.jsonl" in picture
    assert str(tmp_path) not in picture


def test_drawing_loads_no_torch():
    code = "import sys, flowrl.visualize; assert not {'torch', 'transformers', 'networkx', 'rich'} & set(sys.modules)"
    root = importlib.import_module("pathlib").Path(fl.__file__).parent.parent
    subprocess.run([sys.executable, "-c", code], check=True, cwd=root, timeout=60)


@given(st.lists(st.tuples(st.floats(-500, 500), st.floats(0, 60)), max_size=12), st.floats(0, 20))
def test_spread_keeps_order_distance_and_bounds(items, gap):
    widths = [width for _, width in items]
    low, high = 0.0, sum(widths) + gap * max(0, len(items) - 1) + 50
    found = spread([goal for goal, _ in items], widths, gap, low, high)
    edges = [(x - width / 2, x + width / 2) for x, width in zip(found, widths, strict=True)]
    assert all(low - 1e-6 <= a and b <= high + 1e-6 for a, b in edges)
    assert all(b + gap <= a + 1e-6 for (_, b), (a, _) in itertools.pairwise(edges))
