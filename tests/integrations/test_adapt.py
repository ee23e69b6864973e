"""adapt: a dense checkpoint that is continued at longer lengths."""

import json
import re

import pytest
import torch
import transformers
from integrations.families import DISTILBERT, SMALL, T5, Family, make
from tokenizers import Tokenizer, models, pre_tokenizers

import ds_sparse

WORDS = {word: number for number, word in enumerate(["<s>", "<pad>", "</s>", "<unk>", "<mask>", *map(str, range(45))])}
SIZES = SMALL | {"vocab_size": len(WORDS), "pad_token_id": 1}
FAMILIES = {
    "bert": (transformers.BertForMaskedLM, SIZES),
    "roberta": (transformers.RobertaForSequenceClassification, SIZES | {"max_position_embeddings": 66}),
    "distilbert": (transformers.DistilBertModel, DISTILBERT | {"vocab_size": len(WORDS)}),
    "nomic": (transformers.NomicBertModel, SIZES),
    "t5": (transformers.T5EncoderModel, T5 | {"vocab_size": len(WORDS)}),
    "mpnet": (transformers.MPNetModel, SIZES | {"max_position_embeddings": 66}),
}
DENSE = {"mode": "dense", "block": 16}
SPARSE = {"mode": "bslongformer", "block": 16}


def write(folder, family="bert", tokenizer=True, **changes):
    """A dense checkpoint, as others publish it, and its model."""
    model = make(Family(*FAMILIES[family]), **changes).eval()
    model.save_pretrained(folder)
    if tokenizer:
        words = Tokenizer(models.WordLevel(WORDS, unk_token="<unk>"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.enable_truncation(32)
        tokens = {"unk_token": "<unk>", "pad_token": "<pad>", "model_max_length": 64}
        transformers.PreTrainedTokenizerFast(tokenizer_object=words, **tokens).save_pretrained(folder)
    return model


@pytest.fixture
def folders(tmp_path):
    """Those of a dense checkpoint and of the one that is made of it."""
    return tmp_path / "dense", tmp_path / "long"


def adapt(model, out, max_position=160, block=SPARSE):
    return ds_sparse.adapt(model, out, max_position=max_position, sparsity_config=block)


def change_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def make_batch(tokens):
    """Two sequences, the second of them padded from a third on."""
    ids = torch.randint(5, len(WORDS), (2, tokens), generator=torch.Generator().manual_seed(tokens))
    mask = torch.ones_like(ids)
    mask[1, tokens // 3 :] = 0
    return {"input_ids": ids.masked_fill(mask == 0, 1), "attention_mask": mask}


@torch.no_grad()
def outputs(model, batch):
    output = model(**batch)[0]
    return output if output.dim() == 2 else output[batch["attention_mask"] != 0]


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "mpnet"])
def test_with_a_dense_layout_what_the_original_takes_gives_what_it_gave(family, folders):
    dense, long = folders
    original = write(dense, family)
    report = adapt(dense, long, block=DENSE)
    assert "DenseSparsityConfig, block 16, density 100.0% at 160 tokens" in str(report)
    adapted = type(original).from_pretrained(long, attn_implementation="ds_sparse").eval()
    for tokens in (50, 64):
        batch = make_batch(tokens)
        torch.testing.assert_close(outputs(adapted, batch), outputs(original, batch), rtol=1e-4, atol=1e-5)
    assert torch.isfinite(outputs(adapted, make_batch(160))).all()


def test_it_is_sparse_as_the_structure_says_with_all_that_the_model_had(folders):
    dense, long = folders
    original = write(dense)
    adapt(dense, long)
    adapted = transformers.AutoModelForMaskedLM.from_pretrained(long, attn_implementation="ds_sparse")
    assert adapted.config.sparse_attention["mode"] == "bslongformer" and adapted.config.max_position_embeddings == 160
    ds_sparse.SparseAttentionUtils.extend_position_embedding(original, 160)
    ds_sparse.sparsify(original, SPARSE)
    batch = make_batch(160)
    assert torch.equal(outputs(adapted.eval(), batch), outputs(original, batch))


def test_a_name_of_the_hub_is_found_in_its_cache(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    repository = tmp_path / "cache" / "models--someone--encoder"
    write(repository / "snapshots" / "5eed")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("5eed")
    ds_sparse.adapt("someone/encoder", tmp_path / "long", max_position=160, sparsity_config=SPARSE)
    assert (tmp_path / "long" / "model.safetensors").exists()


def test_the_dtype_stays_and_the_tokenizer_takes_as_many_tokens(folders):
    dense, long = folders
    write(dense).to(torch.bfloat16).save_pretrained(dense)
    adapt(dense, long)
    assert transformers.AutoModel.from_pretrained(long).dtype == torch.bfloat16
    tokenizer = transformers.AutoTokenizer.from_pretrained(long)
    text = " ".join(["7"] * 1000)
    assert len(tokenizer(text, truncation=True)["input_ids"]) == 160
    assert len(Tokenizer.from_file(str(long / "tokenizer.json")).encode(text).ids) == 160


def test_the_files_of_sentence_transformers_come_along_with_the_new_length(folders):
    dense, long = folders
    write(dense)
    modules = [{"idx": 0, "name": "0", "path": ""}, {"idx": 1, "name": "1", "path": "1_Pooling"}]
    (dense / "modules.json").write_text(json.dumps([*modules, {"idx": 2, "name": "2", "path": "2_Normalize"}]))
    (dense / "sentence_bert_config.json").write_text('{"max_seq_length": 32, "do_lower_case": false}')
    (dense / "config_sentence_transformers.json").write_text('{"prompts": {}}')
    (dense / "1_Pooling").mkdir()
    (dense / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    adapt(dense, long)
    settings = json.loads((long / "sentence_bert_config.json").read_text())
    assert settings == {"max_seq_length": 160, "do_lower_case": False}
    for name in ("modules.json", "config_sentence_transformers.json", "1_Pooling/config.json"):
        assert (long / name).read_text() == (dense / name).read_text()


def test_rotary_positions_need_no_table_and_keep_their_weights(folders, capsys):
    dense, long = folders
    original = write(dense, "nomic")
    adapt(dense, long)
    assert "NomicBertModel has rotary positions and no table, so its weights stay" in capsys.readouterr().out
    adapted = transformers.AutoModel.from_pretrained(long, attn_implementation="ds_sparse")
    assert adapted.config.max_position_embeddings == 160
    weights = adapted.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in original.state_dict().items())


def test_rotary_angles_that_depend_on_the_longest_sequence_stay(folders):
    dense, long = folders
    yarn = {"rope_type": "yarn", "factor": None, "original_max_position_embeddings": 32, "rope_theta": 1000.0}
    model = write(dense, "nomic", rope_parameters=yarn)
    adapt(dense, long, block=DENSE)
    adapted = type(model).from_pretrained(long, attn_implementation="ds_sparse").eval()
    torch.testing.assert_close(outputs(adapted, make_batch(160)), outputs(model, make_batch(160)), rtol=1e-4, atol=1e-5)


def test_weights_that_the_checkpoint_lacks_or_has_besides_are_named(folders, capsys):
    dense, long = folders
    write(dense)
    change_config(dense, architectures=["BertModel"])
    adapt(dense, long)
    printed = capsys.readouterr().out
    assert "not in the checkpoint, and initialized anew: pooler.dense.bias, pooler.dense.weight." in printed
    assert "in the checkpoint, and left out: cls.predictions.bias" in printed


def test_without_a_structure_and_a_tokenizer_it_has_the_default_and_none(folders, capsys):
    dense, long = folders
    write(dense, tokenizer=False)
    report = ds_sparse.adapt(dense, long, max_position=160)
    assert "FixedSparsityConfig, block 16" in str(report) and not (long / "tokenizer_config.json").exists()
    printed = capsys.readouterr().out
    assert f"{dense} has no tokenizer, so {long} has none either; copy that of the model into it." in printed
    assert "are wanted" not in printed, "there is room"
    adapted = transformers.AutoModel.from_pretrained(long, attn_implementation="ds_sparse")
    assert adapted.config.sparse_attention["mode"] == "fixed"


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "gpt2"])
def test_a_batch_of_more_tokens_than_positions_is_refused_with_what_extends_these(family, capsys):
    gpt2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 64, "vocab_size": 50}
    cls, sizes = {**FAMILIES, "gpt2": (transformers.GPT2Model, gpt2)}[family]
    model = cls(cls.config_class(**sizes)).eval()
    ds_sparse.sparsify(model, SPARSE, max_seq_length=96)
    how = "a longer table of positions" if family == "gpt2" else r"SparseAttentionUtils.extend_position_embedding\("
    said = rf"{cls.__name__.split('For')[0]}\w* takes up to 64 tokens, and 96 are wanted; extend it with {how}"
    assert re.search(said, capsys.readouterr().out)
    batch = make_batch(96)
    batch["input_ids"] = batch["input_ids"].clamp(min=5)
    with pytest.raises(ValueError, match=said):
        model(**batch)
    model(batch["input_ids"][:, :64])
    if family == "roberta":  # whose padding takes no position
        model(torch.nn.functional.pad(batch["input_ids"][:, :64], (0, 32), value=1))


@pytest.mark.parametrize("there", ["a file in it", "a file", "a link to nothing"])
def test_nothing_is_overwritten(there, folders, tmp_path):
    dense, long = folders
    write(dense)
    if there == "a file in it":
        long.mkdir()
        (long / "notes.txt").write_text("mine")
    elif there == "a file":
        long.write_text("mine")
    else:
        long.symlink_to(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="long: there is something already, and nothing is overwritten"):
        adapt(dense, long)
    assert not (long / "config.json").exists() and not (tmp_path / "nowhere").exists()


def test_errors_are_sentences_and_leave_nothing_behind(folders, tmp_path):
    dense, long = folders[0], tmp_path / "a" / "long"
    write(dense)

    def assert_refused(sentence, model=dense, **options):
        with pytest.raises(ValueError, match=sentence):
            adapt(model, long, **options)
        assert not long.parent.exists()

    with pytest.raises(TypeError, match="max_position is '4096'; it has to be an integer"):
        adapt(dense, long, max_position="4096")
    assert_refused("no-such-model: no such folder, and no model of this name in the hub's cache", "no-such-model")
    assert_refused("no/such/model: no such folder", "no/such/model")
    assert_refused("it has no config.json", tmp_path)
    assert_refused("max_position is 63, and there are 64 positions", max_position=63)
    assert_refused('sparse_attention.blok: unknown key .* Did you mean "block"', block={"mode": "fixed", "blok": 16})
    write(tmp_path / "mpnet", "mpnet")
    assert_refused("MPNetModel computes its attention itself .* would stay dense", tmp_path / "mpnet")
    (dense / "model.safetensors").rename(tmp_path / "weights")
    assert_refused("its weights cannot be loaded: .*no file named model.safetensors")
    (dense / "model.safetensors").write_bytes(b"no weights")
    assert_refused("its weights cannot be loaded: SafetensorError")
    (tmp_path / "weights").rename(dense / "model.safetensors")
    (dense / "modules.json").write_text("{")
    assert_refused("modules.json: not valid JSON")
    (dense / "modules.json").write_text('[{"path": "../../elsewhere"}]')
    assert_refused("../../elsewhere is not a folder beside it")
    (dense / "modules.json").unlink()
    change_config(dense, architectures=["OurBertModel"])
    assert_refused("names the class OurBertModel, which transformers .* does not have")
    change_config(dense, model_type="our_bert")
    assert_refused("its config.json cannot be read: .*our_bert")
    (dense / "config.json").write_text("{")
    assert_refused("its config.json cannot be read")


def test_a_folder_that_cannot_be_filled_is_emptied_again_and_an_empty_one_is_taken(folders, monkeypatch):
    dense, long = folders
    write(dense)
    long.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(transformers.PreTrainedTokenizerFast, "save_pretrained", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            adapt(dense, long)
    assert not list(long.iterdir())
    adapt(dense, long)
    assert (long / "model.safetensors").exists()
