//! Tensors in safetensors files: reads query, key and value, writes output and log-sum-exp.

use std::fs::File;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use safetensors::SafeTensors;
use safetensors::tensor::{Dtype, Metadata, SafeTensorError, TensorInfo};

use crate::backend::Output;
use crate::dtype::DType;
use crate::inputs::InputTensors;
use crate::problem::{Descale, Descales, Problem};
use crate::tensor::{Layout, Shape, Tensor, TensorError};

/// The names of the three inputs in a file; `q`, `k` and `v` by default.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Names {
    /// Name of the query.
    pub query: String,
    /// Name of the key.
    pub key: String,
    /// Name of the value.
    pub value: String,
}

impl Default for Names {
    fn default() -> Self {
        Names { query: "q".to_owned(), key: "k".to_owned(), value: "v".to_owned() }
    }
}

/// Why a file cannot be read or written.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum FileError {
    /// The file cannot be read.
    #[error("cannot read {}: {source}", path.display())]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The file cannot be written.
    #[error("cannot write {}: {reason}", path.display())]
    Write {
        /// Path of the file.
        path: PathBuf,
        /// Why it cannot be written.
        reason: String,
    },
    /// The file ends too early.
    #[error("{} is truncated or no safetensors file", path.display())]
    Truncated {
        /// Path of the file.
        path: PathBuf,
    },
    /// The header of the file is invalid.
    #[error("{} is no safetensors file: {reason}", path.display())]
    Format {
        /// Path of the file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The file does not contain a tensor.
    #[error("{} has no tensor `{name}`, only {found}", path.display())]
    Missing {
        /// Path of the file.
        path: PathBuf,
        /// Name of the missing tensor.
        name: String,
        /// Names of the tensors that the file contains.
        found: String,
    },
    /// A tensor has an unsupported element type.
    #[error("{}: tensor `{name}` has element type {given}; f32, f16, bf16, e4m3, e5m2 and int8 are supported", path.display())]
    DType {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        name: String,
        /// Its element type.
        given: String,
    },
    /// A tensor does not have four dimensions.
    #[error("{}: tensor `{name}` has shape {given:?}, expected [batch, length, heads, dim]", path.display())]
    Rank {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        name: String,
        /// Its shape.
        given: Vec<usize>,
    },
    /// Descale factors have an unexpected type or shape.
    #[error("{}: tensor `{name}` is {given}, expected f32 of shape {expected}", path.display())]
    Factors {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        name: String,
        /// Its element type and shape.
        given: String,
        /// The shapes that match the other tensors.
        expected: String,
    },
    /// A tensor cannot be created, for example because memory runs out.
    #[error("{}: tensor `{name}`: {source}", path.display())]
    Tensor {
        /// Path of the file.
        path: PathBuf,
        /// Name of the tensor.
        name: String,
        /// What is wrong with it.
        source: TensorError,
    },
}

/// Reads query, key and value, each of shape [batch, length, heads, dim], and the descale factors
/// of 8-bit ones, where the file has them: under the tensor's name with `_descale`, in f32 of shape
/// [], [key heads], [batch, key heads], or for keys and values [batch, length, key heads].
///
/// ```no_run
/// use flashcore::file::{self, Names};
///
/// let tensors = file::read_inputs("attention.safetensors", &Names::default())?;
/// println!("{}", tensors.inputs().problem()?);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn read_inputs(path: impl AsRef<Path>, names: &Names) -> Result<InputTensors, FileError> {
    let path = path.as_ref();
    let bytes =
        std::fs::read(path).map_err(|source| FileError::Read { path: path.to_owned(), source })?;
    let file = SafeTensors::deserialize(&bytes).map_err(|error| format_error(path, error))?;
    let [query, key, value] =
        [&names.query, &names.key, &names.value].map(|name| tensor(path, &file, name));
    let (query, key, value) = (query?, key?, value?);
    let heads = key.shape().heads;
    let of = Descales {
        query: (&names.query, &query),
        key: (&names.key, &key),
        value: (&names.value, &value),
    };
    let descales = of.try_map(|(name, tensor)| match tensor.dtype().is_8_bit() {
        true => factors(path, &file, &format!("{name}_descale"), tensor.shape(), heads),
        false => Ok(None),
    })?;
    Ok(InputTensors { query, key, value, slopes: None, sinks: None, descales })
}

/// Writes `output`, (batch, query length, query heads, value head dim), and `lse`, f32 of shape
/// (batch, query heads, query length). Packed queries are one batch entry of all rows.
///
/// ```no_run
/// use flashcore::{Backend, CpuBackend, InputTensors, Problem, RunOptions, file};
///
/// let problem = Problem::new(1, 8, 512, 64);
/// let tensors = InputTensors::random(&problem, 0)?;
/// let result = CpuBackend::new().run(&problem, tensors.inputs(), &RunOptions::default())?;
/// file::write_output("result.safetensors", &problem, &result)?;
/// # Ok::<(), flashcore::Error>(())
/// ```
pub fn write_output(
    path: impl AsRef<Path>,
    problem: &Problem,
    result: &Output,
) -> Result<(), FileError> {
    let path = path.as_ref();
    let shape: [usize; 4] = result.output.shape().into();
    let [batch, rows, heads, _] = shape;
    let format = format_of(problem.dtypes.output);
    let tensors = [
        ("lse", Dtype::F32, vec![batch, heads, rows], bytemuck::cast_slice(&result.lse)),
        ("output", format, shape.to_vec(), result.output.bytes()),
    ];
    write_tensors(path, tensors)
        .map_err(|error| FileError::Write { path: path.to_owned(), reason: error.to_string() })
}

/// Writes names, types, shapes and contents as any other program would. `serialize_to_file` would
/// write another file, which this user alone may read, and put it in the place of a link or a
/// device.
fn write_tensors(path: &Path, tensors: [(&str, Dtype, Vec<usize>, &[u8]); 2]) -> io::Result<()> {
    let contents = tensors.each_ref().map(|(_, _, _, bytes)| *bytes);
    let mut end = 0;
    let infos = tensors.map(|(name, dtype, shape, bytes)| {
        let begin = end;
        end += bytes.len();
        (name.to_owned(), TensorInfo { dtype, shape, data_offsets: (begin, end) })
    });
    let header = Metadata::new(None, infos.to_vec()).map_err(io::Error::other)?;
    let mut header = serde_json::to_vec(&header)?;
    // The tensors begin at a multiple of 8 bytes.
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = File::create(path)?;
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    contents.into_iter().try_for_each(|bytes| file.write_all(bytes))
}

fn tensor(path: &Path, file: &SafeTensors<'_>, name: &str) -> Result<Tensor, FileError> {
    let view = file.tensor(name).map_err(|_| {
        let mut names: Vec<String> = file.names().iter().map(|name| format!("`{name}`")).collect();
        names.sort();
        FileError::Missing {
            path: path.to_owned(),
            name: name.to_owned(),
            found: if names.is_empty() { "nothing".to_owned() } else { names.join(", ") },
        }
    })?;
    let dtype = match view.dtype() {
        Dtype::F32 => DType::F32,
        Dtype::F16 => DType::F16,
        Dtype::BF16 => DType::BF16,
        Dtype::F8_E4M3 => DType::E4M3,
        Dtype::F8_E5M2 => DType::E5M2,
        Dtype::I8 => DType::Int8,
        other => {
            return Err(FileError::DType {
                path: path.to_owned(),
                name: name.to_owned(),
                given: format!("{other:?}").to_lowercase(),
            });
        }
    };
    let shape: [usize; 4] = view.shape().try_into().map_err(|_| FileError::Rank {
        path: path.to_owned(),
        name: name.to_owned(),
        given: view.shape().to_vec(),
    })?;
    Layout::contiguous(shape.into())
        .and_then(|layout| Tensor::from_bytes(dtype, layout, view.data()))
        .map_err(|source| FileError::Tensor {
            path: path.to_owned(),
            name: name.to_owned(),
            source,
        })
}

/// Reads the descale factors of a tensor, where there are any.
fn factors(
    path: &Path,
    file: &SafeTensors<'_>,
    name: &str,
    of: Shape,
    heads: usize,
) -> Result<Option<Tensor>, FileError> {
    let Ok(view) = file.tensor(name) else { return Ok(None) };
    let (path, name) = (path.to_owned(), name.to_owned());
    let Shape { batch, length, .. } = of;
    let strides = [length.saturating_mul(heads), heads, 1];
    let found = strides.len().checked_sub(view.shape().len()).and_then(|outer| {
        let given = (view.shape(), &strides[outer..]);
        Descale::of_factors(given, batch, Shape { heads, ..of }, false)
    });
    let Some((_, shape, strides)) = found.filter(|_| view.dtype() == Dtype::F32) else {
        let dtype = format!("{:?}", view.dtype()).to_lowercase();
        let given = format!("{dtype} of shape {:?}", view.shape());
        let expected = format!("[], [{heads}], [{batch}, {heads}] or [{batch}, {length}, {heads}]");
        return Err(FileError::Factors { path, name, given, expected });
    };
    let tensor = Layout::strided(shape, strides)
        .and_then(|layout| Tensor::from_bytes(DType::F32, layout, view.data()));
    tensor.map(Some).map_err(|source| FileError::Tensor { path, name, source })
}

fn format_of(dtype: DType) -> Dtype {
    match dtype {
        DType::F32 => Dtype::F32,
        DType::F16 => Dtype::F16,
        DType::BF16 => Dtype::BF16,
        DType::E4M3 => Dtype::F8_E4M3,
        DType::E5M2 => Dtype::F8_E5M2,
        DType::Int8 => Dtype::I8,
    }
}

fn format_error(path: &Path, error: SafeTensorError) -> FileError {
    let path = path.to_owned();
    match error {
        SafeTensorError::HeaderTooSmall
        | SafeTensorError::InvalidHeaderLength
        | SafeTensorError::MetadataIncompleteBuffer => FileError::Truncated { path },
        error => FileError::Format { path, reason: error.to_string().replace('\n', " ") },
    }
}

#[cfg(test)]
mod tests {
    use safetensors::serialize_to_file;
    use safetensors::tensor::TensorView;

    use super::*;
    use crate::backend::{Backend, RunOptions};
    use crate::cpu::CpuBackend;
    use crate::problem::Storage;

    fn view(dtype: Dtype, shape: &[usize], bytes: &'static [u8]) -> TensorView<'static> {
        TensorView::new(dtype, shape.to_vec(), bytes).unwrap()
    }

    fn write(tensors: Vec<(&str, TensorView<'_>)>) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().unwrap();
        serialize_to_file(tensors, None, file.path()).unwrap();
        file
    }

    fn refusal(file: &tempfile::NamedTempFile) -> String {
        let error = read_inputs(file.path(), &Names::default()).unwrap_err();
        error.to_string().replace(&file.path().display().to_string(), "FILE")
    }

    #[test]
    fn what_is_written_can_be_read() {
        let problem = Problem::new(2, 4, 5, 8).with_kv_heads(2).with_key_length(7);
        let tensors = InputTensors::random(&problem, 3).unwrap();
        let [query, key, value]: [(_, &Tensor); 3] =
            [("q", &tensors.query), ("k", &tensors.key), ("v", &tensors.value)];
        let views = [query, key, value].map(|(name, tensor)| {
            let shape: [usize; 4] = tensor.shape().into();
            (name, TensorView::new(Dtype::F16, shape.to_vec(), tensor.bytes()).unwrap())
        });
        let file = write(views.to_vec());
        let read = read_inputs(file.path(), &Names::default()).unwrap();
        assert_eq!(read.query.bytes(), tensors.query.bytes());
        assert_eq!(read.inputs().problem().unwrap(), problem);

        let result =
            CpuBackend::new().run(&problem, read.inputs(), &RunOptions::default()).unwrap();
        write_output(file.path(), &problem, &result).unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        let written = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(written.tensor("output").unwrap().shape(), [2, 5, 4, 8]);
        assert_eq!(written.tensor("output").unwrap().data(), result.output.bytes());
        assert_eq!(written.tensor("lse").unwrap().shape(), [2, 4, 5]);
    }

    #[test]
    fn packed_queries_are_one_batch_entry() {
        let problem = Problem::new(3, 4, 5, 8).with_storage(Storage::Packed(9), Storage::Padded);
        let file = tempfile::NamedTempFile::new().unwrap();
        let rows = Problem::new(1, 4, 9, 8);
        let tensors = InputTensors::random(&rows, 3).unwrap();
        let run = CpuBackend::new().run(&rows, tensors.inputs(), &RunOptions::default());
        let result = run.unwrap();
        write_output(file.path(), &problem, &result).unwrap();
        let bytes = std::fs::read(file.path()).unwrap();
        let written = SafeTensors::deserialize(&bytes).unwrap();
        assert_eq!(written.tensor("output").unwrap().shape(), [1, 9, 4, 8]);
        assert_eq!(written.tensor("lse").unwrap().shape(), [1, 4, 9]);
        let lse: &[u8] = bytemuck::cast_slice(&result.lse);
        assert_eq!(written.tensor("lse").unwrap().data(), lse);
    }

    #[test]
    fn descale_factors_come_with_8_bit_tensors() {
        let rows = |dtype| view(dtype, &[1, 3, 2, 4], &[0; 48]);
        let number = |shape: &[usize], bytes| view(Dtype::F32, shape, bytes);
        let small = |dtype| view(dtype, &[1, 3, 2, 4], &[0; 24]);
        let inputs = |factors: TensorView<'static>| {
            let all = vec![
                ("q", rows(Dtype::F16)),
                ("k", small(Dtype::F8_E4M3)),
                ("v", small(Dtype::I8)),
                ("k_descale", factors),
                // Factors of a 16-bit tensor are ignored.
                ("q_descale", number(&[], &[0; 4])),
            ];
            write(all)
        };
        for (shape, descale) in [
            (&[][..], "k_descale=head"),
            (&[2], "k_descale=head"),
            (&[1, 2], "k_descale=head"),
            (&[1, 3, 2], "k_descale=token"),
        ] {
            let bytes = &[0; 24][..4 * shape.iter().product::<usize>()];
            let file = inputs(number(shape, bytes));
            let read = read_inputs(file.path(), &Names::default()).unwrap();
            let text = read.inputs().problem();
            // Factors per head must not be zero.
            match descale {
                "k_descale=token" => assert!(text.unwrap().text().ends_with(descale)),
                _ => assert!(text.unwrap_err().to_string().contains("k_descale is 0 at batch 0")),
            }
        }
        let file = inputs(view(Dtype::F16, &[2], &[0; 4]));
        assert_eq!(
            refusal(&file),
            "FILE: tensor `k_descale` is f16 of shape [2], expected f32 of shape [], [2], [1, 2] or \
             [1, 3, 2]"
        );
    }

    #[test]
    fn what_is_wrong_is_said() {
        let good = view(Dtype::F16, &[1, 2, 1, 2], &[0; 8]);
        let file = write(vec![("q", good.clone()), ("k", good.clone())]);
        assert_eq!(refusal(&file), "FILE has no tensor `v`, only `k`, `q`");

        let file = write(vec![("q", view(Dtype::F64, &[1, 1, 1, 1], &[0; 8]))]);
        assert_eq!(
            refusal(&file),
            "FILE: tensor `q` has element type f64; f32, f16, bf16, e4m3, e5m2 and int8 are supported"
        );

        let file = write(vec![("q", view(Dtype::F16, &[2, 2], &[0; 8]))]);
        assert_eq!(
            refusal(&file),
            "FILE: tensor `q` has shape [2, 2], expected [batch, length, heads, dim]"
        );

        let missing = read_inputs("/nowhere/x.safetensors", &Names::default()).unwrap_err();
        // The words are those of the operating system; Miri has others.
        let system = std::fs::File::open("/nowhere/x.safetensors").unwrap_err();
        assert_eq!(missing.to_string(), format!("cannot read /nowhere/x.safetensors: {system}"));
    }

    #[test]
    fn every_truncation_is_an_error() {
        let good = view(Dtype::F16, &[1, 2, 1, 2], &[0; 8]);
        let file = write(vec![("q", good.clone()), ("k", good.clone()), ("v", good)]);
        let bytes = std::fs::read(file.path()).unwrap();
        for length in 0..bytes.len() {
            std::fs::write(file.path(), &bytes[..length]).unwrap();
            let message = refusal(&file);
            assert!(!message.contains('\n') && message.starts_with("FILE is "), "{message}");
        }
    }

    #[test]
    fn a_place_that_cannot_be_written_is_an_error() {
        let problem = Problem::new(1, 1, 1, 1);
        let tensors = InputTensors::random(&problem, 0).unwrap();
        let result =
            CpuBackend::new().run(&problem, tensors.inputs(), &RunOptions::default()).unwrap();
        let error = write_output("/nowhere/x", &problem, &result).unwrap_err().to_string();
        assert!(error.starts_with("cannot write /nowhere/x: "), "{error}");
        #[cfg(unix)]
        assert!(error.ends_with("No such file or directory (os error 2)"), "{error}");
    }

    /// As for any program: links and devices are written to, not replaced by a file of this user's.
    #[cfg(unix)]
    #[test]
    fn what_is_no_plain_file_is_written_to() {
        use std::os::unix::fs::{PermissionsExt, symlink};
        let problem = Problem::new(1, 1, 1, 1);
        let tensors = InputTensors::random(&problem, 0).unwrap();
        let result =
            CpuBackend::new().run(&problem, tensors.inputs(), &RunOptions::default()).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let (plain, link) = (folder.path().join("plain"), folder.path().join("link"));
        std::fs::write(&plain, "before").unwrap();
        std::fs::set_permissions(&plain, PermissionsExt::from_mode(0o644)).unwrap();
        symlink(&plain, &link).unwrap();
        write_output(&link, &problem, &result).unwrap();
        assert!(std::fs::symlink_metadata(&link).unwrap().is_symlink());
        assert!(SafeTensors::deserialize(&std::fs::read(&plain).unwrap()).is_ok());
        assert_eq!(std::fs::metadata(&plain).unwrap().permissions().mode() & 0o777, 0o644);
    }
}
