//! The output of this machine's assemblers for a kernel, each on the text that the library would
//! give to a driver of the same release.

use std::time::Duration;

use cuda::toolkit::{self, Assembled, Options, Ptxas, Toolkit};
use cuda::{Device, DeviceInfo};
use flashcore::Progress;
use ptx::{Compiler, Program, Target};
use serde::Serialize;

use super::choose::default_target;
use super::loops::InLoops;
use crate::progress::Bar;
use crate::terminal;

/// The findings of all assemblers, and a verdict.
#[derive(Serialize)]
pub(super) struct Assembly {
    assemblers: Vec<Assembler>,
    /// Whether none of them finds anything to complain about; absent where there is none.
    clean: Option<bool>,
    /// For which of them it is clean, and what the others say.
    verdict: String,
}

/// The findings of one assembler.
#[derive(Serialize)]
struct Assembler {
    name: String,
    /// Absent for the compiler in the driver.
    path: Option<String>,
    seconds: Option<f64>,
    #[serde(flatten)]
    costs: Option<Costs>,
    /// What makes the kernel slow.
    faults: Vec<String>,
    /// What the assembler remarked, faults included.
    notes: Vec<String>,
    /// Why there are no costs.
    refusal: Option<String>,
}

#[derive(Serialize)]
struct Costs {
    registers: u32,
    stack_frame_bytes: u32,
    spill_store_bytes: u32,
    spill_load_bytes: u32,
    barriers: Option<u32>,
    /// Absent without a disassembler that knows the machine code.
    in_loops: Option<InLoops>,
}

/// The machine code of a PTX text.
pub(super) fn disassemble(ptx: &str) -> Result<String, toolkit::Error> {
    let toolkit = Toolkit::find();
    let options = Options { keep_cubin: true, ..Options::default() };
    let assembled = toolkit.ptxas()?.assemble(ptx, &options)?;
    toolkit.disassemble(&assembled.cubin.unwrap_or_default())
}

impl Assembly {
    /// Assembles with every `ptxas` that is found, and with the driver where the kernel could run.
    pub(super) fn of(program: &Program, target: Target) -> Self {
        let toolkit = Toolkit::find();
        let driver = DeviceInfo::query(0).ok().filter(|_| default_target() == target);
        let bar = Bar::new("assembling");
        // Blackwell is known from CUDA 12.8 on.
        let knows = |it: &&Ptxas| {
            target.architecture < 100 || (it.version.major, it.version.minor) >= (12, 8)
        };
        let mut tried: Vec<&Ptxas> = toolkit.assemblers.iter().filter(knows).collect();
        tried.sort_by_key(|ptxas| std::cmp::Reverse(ptxas.version));
        bar.begin((tried.len() + usize::from(driver.is_some())) as u64);
        let mut assemblers = Vec::new();
        for ptxas in tried {
            assemblers.push(Assembler::ptxas(&toolkit, ptxas, program));
            bar.advance(1);
        }
        if let Some(info) = driver {
            assemblers.push(Assembler::driver(&toolkit, &info, program));
        }
        if assemblers.is_empty() {
            let old = || format!("every ptxas here is older than {target}");
            let reason = toolkit.ptxas().err().map_or_else(old, |it| it.to_string());
            return Assembly {
                assemblers,
                clean: None,
                verdict: format!("not assembled: {reason}"),
            };
        }
        let (clean, verdict) = verdict(&assemblers);
        Assembly { assemblers, clean: Some(clean), verdict }
    }

    pub(super) fn describe(&self) -> String {
        let mut text = String::new();
        if !self.assemblers.is_empty() {
            let heading = ["assembler", "registers", "spills", "stack frame", "in loops", "time"];
            let rows: Vec<_> = self.assemblers.iter().map(Assembler::row).collect();
            text += &format!("\n{}", terminal::table(&heading, &rows));
        }
        for assembler in &self.assemblers {
            for remark in assembler.refusal.iter().chain(&assembler.notes) {
                text += &format!("{}: {remark}\n", assembler.name);
            }
        }
        let verdict = match self.clean {
            Some(true) => format!("{} {}", terminal::paint(terminal::GOOD, "clean"), self.verdict),
            Some(false) => {
                format!("{} {}", terminal::paint(terminal::BAD, "not clean"), self.verdict)
            }
            None => self.verdict.clone(),
        };
        text + "\n" + &terminal::fields(&[("verdict", verdict)])
    }
}

/// Returns whether no assembler found a fault, and a sentence about it.
fn verdict(assemblers: &[Assembler]) -> (bool, String) {
    let content = |it: &&Assembler| it.refusal.is_none() && it.faults.is_empty();
    let names: Vec<&str> = assemblers.iter().filter(content).map(|it| it.name.as_str()).collect();
    let complaint = |it: &Assembler| match &it.refusal {
        Some(_) => format!("{} refuses it", it.name),
        None => format!("{}: {}", it.name, it.faults.join("; ")),
    };
    let complaints: Vec<String> =
        assemblers.iter().filter(|it| !content(it)).map(complaint).collect();
    if complaints.is_empty() {
        let names = names.join(" and ");
        return (true, format!("for {names}: no spill, no stack frame, no note of slow code"));
    }
    let clean = if names.is_empty() {
        String::new()
    } else {
        format!("; clean for {}", names.join(" and "))
    };
    (false, format!("for {}{clean}", complaints.join("; ")))
}

impl Assembler {
    fn ptxas(toolkit: &Toolkit, ptxas: &Ptxas, program: &Program) -> Self {
        let name = format!("ptxas {}", ptxas.version);
        let path = Some(ptxas.path.display().to_string());
        let compiler = Compiler::of_cuda(ptxas.version.major, ptxas.version.minor);
        let options = Options { keep_cubin: true, ..Options::default() };
        match ptxas.assemble(&ptx::print_for(program, compiler), &options) {
            Ok(assembled) => {
                let seconds = Some(assembled.seconds);
                Assembler { path, seconds, ..Assembler::accepted(name, assembled, toolkit) }
            }
            Err(toolkit::Error::Failed { log, .. }) => {
                Assembler { path, ..Assembler::refused(name, log) }
            }
            Err(error) => Assembler { path, ..Assembler::refused(name, error.to_string()) },
        }
    }

    /// The compiler inside the driver, which is the one that counts when the kernel runs.
    fn driver(toolkit: &Toolkit, info: &DeviceInfo, program: &Program) -> Self {
        let version = info.driver.version;
        let name = format!("driver {version}");
        let ptx = ptx::print_for(program, Compiler::of_cuda(version.major, version.minor));
        match Device::open(info.ordinal).and_then(|device| device.compile(&ptx)) {
            Ok(cubin) => {
                let seconds = Some(cubin.milliseconds / 1e3);
                let assembled =
                    Assembled { cubin: Some(cubin.bytes), ..Assembled::from_log(cubin.log) };
                Assembler { seconds, ..Assembler::accepted(name, assembled, toolkit) }
            }
            Err(cuda::Error::Compile { log }) => Assembler::refused(name, log),
            Err(error) => Assembler::refused(name, error.to_string()),
        }
    }

    fn accepted(name: String, assembled: Assembled, toolkit: &Toolkit) -> Self {
        let sass = assembled.cubin.as_deref().and_then(|cubin| toolkit.disassemble(cubin).ok());
        let costs = Costs {
            registers: assembled.registers,
            stack_frame_bytes: assembled.stack_frame_bytes,
            spill_store_bytes: assembled.spill_store_bytes,
            spill_load_bytes: assembled.spill_load_bytes,
            barriers: assembled.barriers,
            in_loops: sass.map(|sass| InLoops::count(&sass)),
        };
        Assembler {
            name,
            path: None,
            seconds: None,
            costs: Some(costs),
            faults: assembled.faults(),
            notes: assembled.notes,
            refusal: None,
        }
    }

    /// The first line says what is wrong; the rest of a log repeats it.
    fn refused(name: String, log: String) -> Self {
        let refusal = Some(log.lines().next().unwrap_or_default().to_owned());
        let (faults, notes) = (Vec::new(), Vec::new());
        Assembler { name, path: None, seconds: None, costs: None, faults, notes, refusal }
    }

    fn row(&self) -> Vec<(anstyle::Style, String)> {
        let bytes = |bytes: u32| match bytes {
            0 => terminal::plain("none"),
            bytes => (terminal::BAD, format!("{bytes} bytes")),
        };
        let mut row = vec![terminal::plain(&self.name)];
        match &self.costs {
            Some(costs) => row.extend([
                terminal::plain(costs.registers),
                bytes(costs.spill_store_bytes + costs.spill_load_bytes),
                bytes(costs.stack_frame_bytes),
                terminal::plain(costs.in_loops.as_ref().map_or("-".to_owned(), InLoops::to_string)),
            ]),
            None => row.extend([
                (terminal::BAD, "refused".to_owned()),
                terminal::plain("-"),
                terminal::plain("-"),
                terminal::plain("-"),
            ]),
        }
        let time = self.seconds.map_or_else(
            || "-".to_owned(),
            |seconds| terminal::duration(Duration::from_secs_f64(seconds)),
        );
        row.push(terminal::plain(time));
        row
    }
}
