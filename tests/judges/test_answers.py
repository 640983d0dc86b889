"""Answer lists: GenEval 2's, quirks included, and the robust ones."""

import pytest
import torch
from tiny_judges import judge_tokenizer

from cast_rl.judges.answers import answer_tokens, official_spellings, robust_spellings
from cast_rl.judges.reader import answer_probability

HOW_MANY = "How many circles are in the image?"


@pytest.fixture(scope="module")
def tokenizer():
    return judge_tokenizer()


@pytest.mark.parametrize("answer", ["Yes", "No", "red"])
def test_official_yes_no_ignores_the_answer(answer):
    assert official_spellings("Is the circle red?", answer) == ["Yes", "yes", " yes", " Yes"]


@pytest.mark.parametrize(
    ("answer", "digits"),
    zip(
        ["one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "zero"],
        ["1", "2", "3", "4", "5", "6", "7", "8", "9", "10", "other", "other"],
        strict=True,
    ),
)
def test_official_counts(answer, digits):
    expected = [answer, answer.capitalize(), f" {answer}", f" {answer.capitalize()}", digits, f" {digits}"]
    assert official_spellings(HOW_MANY, answer) == expected


def test_official_takes_first_tokens_and_counts_duplicates(tokenizer):
    def first(text):
        return tokenizer.encode(text)[0]

    def tokens(answer):
        return answer_tokens(tokenizer, HOW_MANY, answer, "official")

    space = tokenizer.encode(" ")
    assert len(space) == 1
    assert tokenizer.encode(" 3") == [*space, first("3")]
    assert tokens("three") == [*map(first, ("three", "Three", " three", " Three", "3")), *space]
    assert tokens("ten")[-2:] == [first("1"), *space]
    # Of "other" and " other", unknown to this vocabulary, only how they begin counts.
    assert tokens("eleven")[-2:] == [first("o"), first(" o")]
    assert len(tokens("one")) == 6


def test_robust_counts_each_single_token_once(tokenizer):
    three = answer_tokens(tokenizer, HOW_MANY, "three", "robust")
    assert [tokenizer.decode([i]) for i in three] == ["three", " three", "3"]
    ten = [tokenizer.decode([i]) for i in answer_tokens(tokenizer, HOW_MANY, "ten", "robust")]
    assert "1" not in ten and " " not in ten and "ten" in ten
    yes = [tokenizer.decode([i]) for i in answer_tokens(tokenizer, "Is it red?", "Yes", "robust")]
    assert yes == ["yes", " yes", "Yes", " Yes"]
    no = [tokenizer.decode([i]) for i in answer_tokens(tokenizer, "Is it red?", "No", "robust")]
    assert no == ["no", " no", "No", " No"]


def test_robust_spellings():
    assert robust_spellings("Yes") == ["yes", " yes", "Yes", " Yes", "YES", " YES"]
    assert robust_spellings("two") == ["two", " two", "Two", " Two", "TWO", " TWO", "2", " 2"]
    assert robust_spellings("twelve") == ["twelve", " twelve", "Twelve", " Twelve", "TWELVE", " TWELVE"]


def test_probability_of_answers():
    logits = torch.randn(2, 10)
    p = logits.double().softmax(-1)
    found = answer_probability(logits, [[3], [1, 1, 4]])
    torch.testing.assert_close(found, torch.stack([p[0, 3], 2 * p[1, 1] + p[1, 4]]).float())
    certain = torch.full((1, 5), -100.0)
    certain[0, 2] = 0
    assert answer_probability(certain, [[2, 2]]).item() == 1


def test_answers_that_no_token_stands_for(tokenizer):
    with pytest.raises(ValueError, match=r"'quokka' to 'Which animal\?' is one token .*answers='official'"):
        answer_tokens(tokenizer, "Which animal?", "quokka", "robust")
    with pytest.raises(ValueError, match="empty answer ' '"):
        answer_tokens(tokenizer, "Which animal?", " ", "robust")
    with pytest.raises(ValueError, match="answers='strict' is no answer mode; use one of official, robust"):
        answer_tokens(tokenizer, "Is it?", "Yes", "strict")
