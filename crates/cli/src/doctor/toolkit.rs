//! Parts of the CUDA toolkit. None is needed to run; each helps to look into a kernel.

use std::env;
use std::fmt;
use std::path::{Path, PathBuf};

use cuda::toolkit::Toolkit;
use serde::Serialize;

/// A program of the toolkit.
#[derive(Serialize)]
pub(super) struct Tool {
    pub(super) name: &'static str,
    path: Option<String>,
    /// Only assemblers are asked: what they make of a kernel depends on it.
    version: Option<String>,
    /// Why it cannot be used, if it is there.
    missing: Option<String>,
}

/// Every assembler, and the rest by name.
pub(super) fn look() -> Vec<Tool> {
    let toolkit = Toolkit::find();
    let mut tools: Vec<Tool> = toolkit
        .assemblers
        .iter()
        .map(|ptxas| Tool {
            version: Some(ptxas.version.to_string()),
            ..Tool::new("ptxas", Some(&ptxas.path))
        })
        .collect();
    tools.extend(
        toolkit.unusable.iter().map(|it| Tool {
            missing: Some(it.reason.clone()),
            ..Tool::new("ptxas", Some(&it.path))
        }),
    );
    if tools.is_empty() {
        tools.push(Tool::new("ptxas", None));
    }
    tools.push(Tool::new("nvdisasm", toolkit.nvdisasm.as_deref()));
    tools.push(Tool::new("cuobjdump", toolkit.cuobjdump.as_deref()));
    for name in ["compute-sanitizer", "ncu"] {
        tools.push(Tool::new(name, find(&toolkit, name).as_deref()));
    }
    tools
}

/// A tool that FlashCore never starts itself, in the folders where the others were looked for.
fn find(toolkit: &Toolkit, name: &str) -> Option<PathBuf> {
    let file = format!("{name}{}", env::consts::EXE_SUFFIX);
    toolkit.searched.iter().map(|folder| folder.join(&file)).find(|path| path.is_file())
}

impl Tool {
    fn new(name: &'static str, path: Option<&Path>) -> Self {
        let path = path.map(|path| path.display().to_string());
        Tool { name, path, version: None, missing: None }
    }
}

impl fmt::Display for Tool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(reason) = &self.missing {
            return write!(f, "not usable: {reason}");
        }
        match (&self.path, &self.version) {
            (Some(path), Some(version)) => write!(f, "{version}, {path}"),
            (Some(path), None) => f.write_str(path),
            (None, _) => f.write_str("not found"),
        }
    }
}
