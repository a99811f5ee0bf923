//! `flashcore inspect`: what a kernel is made of, what assemblers make of it, and what would run
//! for a problem.

mod assembly;
pub(crate) mod choose;
mod loops;
mod plan;
mod program;

use std::error::Error;
use std::fs;
use std::path::PathBuf;

use clap::Args;
use flashcore::{Pass, Problem};
use ptx::Target;
use serde::Serialize;

use self::assembly::Assembly;
use self::choose::Family;
use self::program::Anatomy;
use crate::{Answer, Preferred, terminal};

/// Look into a kernel (configuration, shared memory, registers, spills, PTX, SASS) or a plan
#[derive(Args)]
#[command(mut_arg("preferred", |it| it.requires("problem").conflicts_with("kernel")))]
#[command(mut_arg("backend", |it| it.requires("problem").conflicts_with("kernel")))]
pub(crate) struct Arguments {
    /// A configuration or a family by name [default: list them]
    #[arg(group = "subject")]
    kernel: Option<String>,
    /// The architecture to build for [default: this machine's GPU, or sm_90a]
    #[arg(long, value_parser = choose::parse_target)]
    target: Option<Target>,
    /// What would run for a problem, such as b=1,h=16,s=4096,d=128,bf16,causal
    #[arg(long, value_name = "PROBLEM", group = "subject", conflicts_with = "all")]
    problem: Option<Problem>,
    #[command(flatten)]
    preferred: Preferred,
    /// List every configuration
    #[arg(long, conflicts_with = "kernel")]
    all: bool,
    /// Print the PTX and nothing else
    #[arg(long, group = "text", requires = "subject")]
    ptx: bool,
    /// Print the machine code and nothing else (needs ptxas and nvdisasm)
    #[arg(long, group = "text", requires = "subject")]
    sass: bool,
    /// Write the PTX or the machine code to a file
    #[arg(long, value_name = "FILE", requires = "text", conflicts_with = "json")]
    output: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

pub(crate) fn run(arguments: &Arguments) -> Result<Answer, Box<dyn Error>> {
    let pass = arguments.problem.as_ref().map_or(Pass::Forward, |problem| problem.pass);
    let preference = arguments.preferred.preference(pass);
    let (shipped, target) = match (&arguments.problem, &arguments.kernel) {
        // The text of what the plan chooses, or the plan.
        (Some(problem), _) if arguments.ptx || arguments.sass => {
            plan::chosen(problem, arguments.target, &preference)?
        }
        (Some(problem), _) => {
            return plan::run(problem, arguments.target, &preference, arguments.json);
        }
        (None, name) => {
            let target = arguments.target.unwrap_or_else(choose::default_target);
            match name {
                Some(name) => (choose::kernel(name, target)?, target),
                None => return list(arguments, target),
            }
        }
    };
    let program = shipped.program()?;
    let ptx = ptx::print(&program);
    let sass = if arguments.sass { Some(assembly::disassemble(&ptx)?) } else { None };
    if !arguments.json {
        if let Some(sass) = sass {
            return text_alone(arguments, sass);
        }
        if arguments.ptx {
            return text_alone(arguments, ptx);
        }
    }
    let anatomy = Anatomy::of(&shipped, &program, &ptx);
    let assembly = Assembly::of(&program, target);
    let found = Json { anatomy, assembly, ptx: arguments.ptx.then_some(ptx), sass };
    let text = || found.anatomy.describe() + &found.assembly.describe();
    Answer::of(arguments.json, &found, true, text)
}

#[derive(Serialize)]
struct Json {
    #[serde(flatten)]
    anatomy: Anatomy,
    assembly: Assembly,
    /// Where it was asked for.
    ptx: Option<String>,
    /// Where it was asked for.
    sass: Option<String>,
}

#[derive(Serialize)]
struct ListJson {
    target: String,
    families: Vec<Family>,
}

fn list(arguments: &Arguments, target: Target) -> Result<Answer, Box<dyn Error>> {
    let families = choose::families(target);
    if arguments.json {
        return Answer::json(&ListJson { target: target.to_string(), families }, true);
    }
    if arguments.all {
        let names = families.iter().flat_map(|family| &family.configurations);
        let text = names.map(|name| format!("{name}\n")).collect();
        return Ok(Answer { text, passed: true });
    }
    let count = |family: &Family| family.configurations.len().to_string();
    let width = families.iter().map(|family| count(family).len()).max().unwrap_or(0);
    let fields: Vec<_> = families
        .iter()
        .map(|family| (family.name, format!("{:>width$}  {}", count(family), family.summary)))
        .collect();
    let heading = format!("kernels for {target}, and how many configurations are shipped");
    let text = format!(
        "{}\n{}\n`flashcore inspect KERNEL` looks into one; `flashcore inspect --all` lists every name\n",
        terminal::paint(terminal::HEADING, &heading),
        terminal::fields(&fields)
    );
    Ok(Answer { text, passed: true })
}

/// PTX or machine code, to the file if there is one.
fn text_alone(arguments: &Arguments, text: String) -> Result<Answer, Box<dyn Error>> {
    let Some(path) = &arguments.output else {
        return Ok(Answer { text, passed: true });
    };
    fs::write(path, &text).map_err(|error| format!("cannot write {}: {error}", path.display()))?;
    let written = format!("{} ({} lines)", path.display(), text.lines().count());
    Ok(Answer { text: terminal::fields(&[("written", written)]), passed: true })
}
