"""Results of papers, on two cores in minutes: docs/papers.md says what came.

python -m examples.published                  # all seven, three seeds
python -m examples.published --only soap      # one of them
python -m examples.published --table          # what the committed files say
"""
