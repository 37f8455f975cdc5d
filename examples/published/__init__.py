"""Studies that repeat results of papers on two cores. docs/papers.md reports the results.

python -m examples.published                  # all studies, three seeds
python -m examples.published --only soap      # one study
python -m examples.published --table          # the tables of the committed files
"""
