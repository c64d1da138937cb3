import math

import pytest

from moesaic.common.errors import MoesaicError
from moesaic.data.mmlu import CATCH_ALL, CATEGORIES, PRO_CATEGORIES, SUBJECTS, category_of

# Questions in the test split of these subjects (../shared/data/evals has 22 of the 57), and the test sets that table 4
# of EMO gives for categories made of them alone.
TEST_ROWS = {"college_biology": 144, "high_school_biology": 310, "electrical_engineering": 145}
TABLE_4_TEST = {"biology": 182, "engineering": 58}


def test_57_subjects_in_17_categories_each_in_one():
    assert len(CATEGORIES) == 17
    assert len(SUBJECTS) == len(set(SUBJECTS)) == 57
    assert list(CATEGORIES) == sorted(CATEGORIES)
    assert all(list(subjects) == sorted(subjects) for subjects in CATEGORIES.values())
    assert CATCH_ALL in CATEGORIES
    assert len(PRO_CATEGORIES) == len(set(PRO_CATEGORIES)) == 14


def test_category_of_every_subject():
    assert all(subject in CATEGORIES[category_of(subject)] for subject in SUBJECTS)


def test_an_unknown_subject_is_named_with_the_nearest():
    with pytest.raises(MoesaicError, match=r"'high_school_statistic'.*did you mean 'high_school_statistics'"):
        category_of("high_school_statistic")


@pytest.mark.parametrize("category", TABLE_4_TEST)
def test_sizes_of_table_4_are_40_percent_of_each_subject(category: str):
    rows = sum(math.ceil(0.4 * TEST_ROWS[subject]) for subject in CATEGORIES[category])
    assert rows == TABLE_4_TEST[category]
