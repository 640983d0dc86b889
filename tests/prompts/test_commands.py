"""The command line, trees and pictures; plain texts through a language model."""

import json
import re

import pytest
from PIL import Image
from transformers import AutoTokenizer, Qwen2Config, Qwen2ForCausalLM

from cast_rl.miniature import GENERATOR
from cast_rl.prompts import (
    LanguageModelParser,
    PromptFileError,
    PromptSet,
    TextsError,
    load_prompts,
    load_vocabulary,
    parse,
    read_prompts,
)
from cast_rl.prompts.__main__ import main

COMMON = load_vocabulary("common")
FOX = "two red foxes chasing a duck, and a box"


def test_sample_check_and_show(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    arguments = ["-n", "12", "--atomicity", "3-5", "--skills", "object,count,position", "--seed", "3", "--held-out"]
    assert main(["sample", str(path), *arguments]) == 0
    assert {p.atomicity for p in read_prompts(path)} == {3, 4, 5}
    assert "12 prompts" in capsys.readouterr().out
    assert main(["check", str(path)]) == 0 and "atomicity: 3: 4, 4: 4, 5: 4" in capsys.readouterr().out
    assert main(["show", str(path), "--index", "2"]) == 0
    assert read_prompts(path)[2].text in capsys.readouterr().out
    assert main(["show", str(path), "--index", "12"]) == 1
    assert "has prompts 0 to 11" in capsys.readouterr().err


def test_a_text_is_shown_as_a_tree_and_drawn(tmp_path, capsys):
    assert main(["show", FOX, "--picture", str(tmp_path / "fox.png")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == FOX
    assert lines[1] == "├─ 0 object: Are there any foxes in the image? Yes  'foxes'"
    assert lines[2] == "│  ├─ 1 attribute: Are the foxes red? Yes  'red' 'foxes'"
    assert lines[-1] == "└─ 7 verb: Are the foxes chasing the duck? Yes  'foxes' 'chasing' 'duck'  after 0, 3"
    colors = Image.open(tmp_path / "fox.png").convert("RGB").getcolors(1 << 20)
    assert {(0x44, 0x77, 0xAA), (0xCC, 0x66, 0x77), (0x11, 0x77, 0x33), (0x88, 0x22, 0x55)} <= {c for _, c in colors}
    assert main(["show", FOX, "--picture", str(tmp_path / "fox.svg")]) == 0
    assert (tmp_path / "fox.svg").read_text().startswith("<?xml")
    assert main(["show", FOX, "--picture", "fox.gif"]) == 1
    assert main(["show", "two gnus"]) == 1 and "'gnus' is not in the vocabulary" in capsys.readouterr().err


def answers(*texts):
    """A model that gives these answers in turn and keeps what it was asked."""
    asked = []

    def generate(messages):
        asked.append(messages)
        return texts[len(asked) - 1]

    return generate, asked


def graph(relations=(), **entities):
    things = [{"noun": noun, "count": c, "attributes": list(a)} for noun, (c, *a) in entities.items()]
    links = [{"subject": a, "predicate": p, "object": b} for a, p, b in relations]
    return json.dumps({"entities": things, "relations": links})


def test_a_models_answer_is_placed_in_the_text():
    text = "On a hill, three black sheep look at us while a dog is chasing the sheep"
    generate, asked = answers(f"Sure!\n```json\n{graph([(1, 'chasing', 0)], sheep=(3, 'black'), dog=(1,))}\n```")
    (prompt,) = LanguageModelParser(generate)([text])
    assert prompt.text == text and text in asked[0][0]["content"]
    words = [[text[start:end] for start, end in a.spans] for a in prompt.atoms]
    assert words == [
        ["sheep"], ["black", "sheep"], ["three", "sheep"], ["dog"], ["a", "dog"], ["dog", "chasing", "sheep"],
    ]  # fmt: skip


def test_two_things_of_one_noun_are_found_by_their_attributes():
    text = "a photo of two colored red hats, and a blue hat beside them"
    things = [{"noun": "hat", "count": 2, "attributes": ["colored", "red"]}, {"noun": "hat", "attributes": ["blue"]}]
    (prompt,) = LanguageModelParser(answers(json.dumps({"entities": things}))[0])([text])
    assert [[text[start:end] for start, end in a.spans] for a in prompt.atoms] == [
        ["colored red hats"], ["colored", "colored red hats"], ["red", "colored red hats"],
        ["two", "colored red hats"], ["blue hat"], ["blue", "blue hat"], ["a", "blue hat"],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "complaint"),
    [
        ("I cannot do that.", "no JSON in it"),
        ('{"entities": %s}' % ("[" * 980 + "]" * 980), "the answer is not JSON that can be read|graph.entities"),
        ('{"entities": [', "not JSON"),
        ('{"entities": []}', "graph.entities"),
        (graph(cat=(1, "blue")), "does not say 'blue' of 'blue cat'"),
        (graph(cat=(4,)), "does not say 4"),
        (graph(dog=(1,)), "does not say 'dog'"),
        (graph([(0, "above", 0)], cat=(1,)), "relates an entity to itself"),
    ],
)
def test_a_wrong_answer_is_asked_again_with_what_was_wrong(wrong, complaint):
    generate, asked = answers(wrong, graph(cat=(1, "red")))
    (prompt,) = LanguageModelParser(generate)(["a red cat"])
    assert prompt.graph.entities[0].attributes == ("red",)
    assert re.search(complaint, asked[1][-1]["content"]) and asked[1][-2]["content"] == wrong


def test_every_text_that_failed_is_listed():
    generate, _ = answers("no", "no", graph(cat=(1,)), "no", "no")
    with pytest.raises(TextsError, match="2 of 3 texts(.|\n)*text 1, 'one'(.|\n)*text 3, 'three'"):
        LanguageModelParser(generate, attempts=2)(["one", "a cat", "three"])


def test_every_line_of_a_text_file_that_failed_is_named_with_its_number(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text("one\n\n  a cat  \nthree\n")
    generate, asked = answers("no", graph(cat=(1,)), graph(dog=(1,)))
    with pytest.raises(PromptFileError) as error:
        load_prompts(path, parser=LanguageModelParser(generate, attempts=1))
    assert str(error.value).splitlines() == [
        f"{path} has 2 bad lines; mend or remove them:",
        "  line 1: the answer has no JSON in it",
        "  line 4: object: the text does not say 'dog' of 'dog'",
    ]
    assert len(asked) == 3
    path.write_bytes(b"a cat\n\xff\na dog\n\xfe")
    with pytest.raises(PromptFileError, match="2 bad lines(.|\n)*line 2: not UTF-8(.|\n)*line 4: not UTF-8"):
        load_prompts(path, parser=LanguageModelParser(generate))
    path.write_text("a cat\ntwo gnus\n")
    with pytest.raises(ValueError, match=r"mine.txt: 'two gnus': character 4: 'gnus' is not in the vocabulary"):
        load_prompts(path, parser=lambda texts: PromptSet.from_graphs(parse(text, COMMON) for text in texts))
    path.write_text(" \n")
    with pytest.raises(ValueError, match="mine.txt has no prompt in it"):
        load_prompts(path, parser=LanguageModelParser(generate))


def test_a_local_model_is_loaded_and_asked(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(GENERATOR / "tokenizer")
    tokenizer.chat_template = None
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    model = Qwen2ForCausalLM(Qwen2Config(vocab_size=len(tokenizer), num_key_value_heads=1, **sizes))
    model.save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="no chat template"):
        LanguageModelParser.load(str(tmp_path))
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
    tokenizer.save_pretrained(tmp_path)
    parser = LanguageModelParser.load(str(tmp_path), max_new_tokens=4)
    assert isinstance(parser.generate([{"role": "user", "content": "a red circle"}]), str)
    with pytest.raises(ValueError, match="1 of 1 texts"):
        parser(["a red circle"])
