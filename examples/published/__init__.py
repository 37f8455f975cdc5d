"""Results of papers, rerun on two cores: docs/papers.md reports what was found.

python -m examples.published                  # all of them, three seeds
python -m examples.published --only soap      # one of them
python -m examples.published --table          # the tables of the committed files
"""
