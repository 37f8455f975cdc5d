"""What people type into the search finds the page that they mean, or the build of the pages fails.

The order is that of Material's search: lunr without lengths of fields, where a word stands for all
words that begin with it, and pages and whatever has more of the words count more. Stop words are
words here.
"""

import json
import math
import re
from collections import Counter, defaultdict
from html import unescape
from pathlib import Path

from mkdocs.plugins import get_plugin_logger

logger = get_plugin_logger("search")

SOON = 1.2  # lunr's k1: how soon a word that is replayed counts no more
ASKED = {
    "weight decay groups": "groups/",
    "no decay bias": "groups/",
    "no decay for biases": "groups/",
    "layer decay": "groups/",
    "multiple gpus": "distributed/",
    "gradient accumulation": "accumulation/",
    "accumulate four batches": "accumulation/",
    "evaluate averaged weights": "averages/",
    "check my chain": "check/",
    "is my chain what I think": "check/",
    "parameters not updated": "audit_update/",
    "did my optimizer": "audit_update/",
    "which parameters moved": "audit_update/",
    "wandb": "metrics/",
    "gradient norm": "metrics/",
    "skip nan": "guards/",
    "gradscaler": "mixed_precision/",
    "bf16": "mixed_precision/",
    "fsdp2": "distributed/",
    "resume": "checkpoints/",
    "muon": "matrices/",
    "fused qkv": "fused_weights/",
    "muon per head": "fused_weights/",
    "lr for head": "groups/",
    "clip per layer": "concepts/",
    "z-clip": "modules/adaptive/z_clip/",
    "ema": "averages/",
    "custom transform": "write_your_own/",
    "loss spike": "tutorial/",
    "glossary": "glossary/",
    "install": "install/",
}


def on_post_build(config, **_):
    index = Path(config["site_dir"]) / "search" / "search_index.json"
    search = Search(json.loads(index.read_text(encoding="utf-8")))
    for query, page in ASKED.items():
        first = search.pages(query)[0]
        if first != page:
            logger.warning("a search for %r finds %s first, and not %s", query, first, page)


class Search:
    def __init__(self, index):
        config, self.docs = index["config"], index["docs"]
        self.separator = re.compile(config["separator"])
        self.boosts = {name: field["boost"] for name, field in config["fields"].items()}
        self.places = defaultdict(Counter)  # of each word, and how often it stands there
        for i, doc in enumerate(self.docs):
            for field in self.boosts.keys() & doc.keys():
                for word in self.words(re.sub(r"<[^>]*>", " ", doc[field])):
                    self.places[word][i, field] += 1

    def words(self, text):
        return [word for word in self.separator.split(unescape(text).lower()) if word]

    def pages(self, query):
        """The pages for a query, best first."""
        asked, scores, matched = self.words(query), Counter(), defaultdict(set)
        for word, places in self.places.items():
            begun = {each for each in asked if word.startswith(each)}
            rare = math.log(1 + abs(len(self.docs) - len(places) + 0.5) / (len(places) + 0.5))
            for (i, field), count in places.items() if begun else ():
                often = (SOON + 1) * count / (SOON + count)
                boost = self.boosts[field] * self.docs[i].get("boost", 1)
                scores[i] += len(begun) * rare * often * boost
                matched[i] |= begun
        for i in scores:
            whole = "#" not in self.docs[i]["location"]
            scores[i] *= 1 + (whole + len(matched[i]) / len(asked)) ** 2
        return list(dict.fromkeys([self.page(i) for i, _ in scores.most_common()]))

    def page(self, i):
        return self.docs[i]["location"].partition("#")[0]
